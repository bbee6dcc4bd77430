//! Ranks as threads of one process: tensors are exchanged in memory and combined in rank order, without sockets.
//!
//! Results are the same to the bit from run to run. A rank that fails, panics or returns early ends the waiting of the
//! others, with an error that names it.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ferrotitan_mesh::{Degrees, Grid, Mesh};
use tch::Device;

use super::room::{Room, Seat};
use crate::{Backend, BoxError, DeviceMesh, Error, Members, Recorder, Result, Transport};

/// How a run of rank threads goes about it.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a rank waits for others before it gives up.
    pub timeout: Duration,
    /// How many threads libtorch uses for one operation of one rank. When absent: the machine's cores divided by the
    /// number of ranks, at least 1.
    pub intra_op_threads: Option<usize>,
    /// How many events each rank's recorder keeps.
    pub recorder_capacity: usize,
}

impl Default for Options {
    fn default() -> Self {
        let timeout = Duration::from_secs(600);
        Options { timeout, intra_op_threads: None, recorder_capacity: Recorder::CAPACITY }
    }
}

/// Runs `body` on every rank of a mesh, each on a thread of its own called `rank 3`, on the CPU; gives their values, in
/// rank order.
///
/// # Errors
/// [`Error::RankFailed`] or [`Error::RankPanicked`] with the first rank that failed of itself and its error;
/// [`Error::Mesh`] for bad degrees.
pub fn run<T, E, F>(degrees: Degrees, options: &Options, body: F) -> Result<Vec<T>>
where
    T: Send,
    E: Into<BoxError>,
    F: Fn(DeviceMesh) -> Result<T, E> + Sync,
{
    let grids: Vec<_> = Grid::all(degrees)?.collect();
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let intra_op = options.intra_op_threads.unwrap_or(cores / grids.len()).max(1);
    let world = Arc::new(World { timeout: options.timeout, open: Mutex::default() });
    let cause = Mutex::new(None);

    let rank_main = |grid: Grid| -> Option<T> {
        let rank = grid.rank();
        // OpenMP keeps this number per thread.
        tch::set_num_threads(i32::try_from(intra_op).unwrap_or(i32::MAX));
        let attempt = catch_unwind(AssertUnwindSafe(|| {
            let backend = Arc::new(Threads { world: world.clone() });
            let recorder = Recorder::new(options.recorder_capacity);
            let mesh = DeviceMesh::new(grid, Device::Cpu, backend, recorder)?;
            body(mesh).map_err(Into::into)
        }));
        let (reason, error) = match attempt {
            Ok(Ok(value)) => {
                world.depart(rank);
                return Some(value);
            }
            Ok(Err(source)) => {
                let source: BoxError = source;
                (source.to_string(), Error::RankFailed { rank, source })
            }
            Err(payload) => {
                let message = panic_message(&*payload);
                (format!("it panicked: {message}"), Error::RankPanicked { rank, message })
            }
        };
        blame(&cause, world.fail(rank, &reason), error);
        None
    };

    let values: Vec<Option<T>> = thread::scope(|scope| {
        let rank_main = &rank_main;
        let threads: Vec<_> = grids
            .iter()
            .map(|&grid| {
                let builder = thread::Builder::new().name(format!("rank {}", grid.rank())).stack_size(16 << 20);
                let spawned = builder.spawn_scoped(scope, move || rank_main(grid));
                spawned.map_err(|error| {
                    let rank = grid.rank();
                    let first = world.fail(rank, &error.to_string());
                    blame(&cause, first, Error::RankFailed { rank, source: error.into() });
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.ok().and_then(|thread| thread.join().ok().flatten())).collect()
    });
    match cause.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(values.into_iter().flatten().collect()),
    }
}

/// Keeps the error of the rank that failed first, or any error while that rank's is not known: it may have told of its
/// failure and yet returned a value.
fn blame(cause: &Mutex<Option<(bool, Error)>>, first: bool, error: Error) {
    let mut cause = cause.lock().unwrap_or_else(PoisonError::into_inner);
    if cause.as_ref().is_none_or(|(known_first, _)| first && !known_first) {
        *cause = Some((first, error));
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// What the rank threads of one run share.
#[derive(Debug)]
struct World {
    timeout: Duration,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    rooms: HashMap<(Arc<str>, Vec<usize>), Arc<Room>>,
    failed: Option<(usize, String)>,
    departed: Vec<usize>,
}

impl World {
    fn open(&self) -> MutexGuard<'_, Open> {
        // Nothing that panics runs while the lock is held.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn room(&self, members: &Members) -> Arc<Room> {
        let mut open = self.open();
        let key = (members.name().clone(), members.ranks().to_vec());
        if let Some(room) = open.rooms.get(&key) {
            return room.clone();
        }
        let room = Arc::new(Room::new(self.timeout));
        if let Some((rank, reason)) = &open.failed {
            room.fail(*rank, reason);
        }
        open.departed.iter().for_each(|&rank| room.depart(rank));
        open.rooms.insert(key, room.clone());
        room
    }

    /// Tells everyone that a rank has failed, and the caller whether this rank was the first.
    fn fail(&self, rank: usize, reason: &str) -> bool {
        let mut open = self.open();
        if let Some((first, _)) = &open.failed {
            return *first == rank;
        }
        open.failed = Some((rank, reason.to_owned()));
        open.rooms.values().for_each(|room| room.fail(rank, reason));
        true
    }

    /// Tells everyone that a rank has returned.
    fn depart(&self, rank: usize) {
        let mut open = self.open();
        open.departed.push(rank);
        open.rooms.values().for_each(|room| room.depart(rank));
    }
}

/// One rank's way into the rooms.
#[derive(Debug)]
struct Threads {
    world: Arc<World>,
}

impl Backend for Threads {
    fn join(&self, members: &Members) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Seat { room: self.world.room(members), members: members.clone() }))
    }

    fn fail(&self, rank: usize, reason: &str) {
        self.world.fail(rank, reason);
    }
}
