//! Ranks as processes, on one machine or several: c10d inside libtorch, with Gloo on the CPU and NCCL on CUDA.
//!
//! Ranks find each other through the environment that `torchrun` sets; see [`Environment`]. Rank 0 serves the store
//! where they meet, unless torchrun's agent does.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ferrotitan_ext::process_group::{GlooOptions, NcclOptions, ProcessGroup, nccl_available};
use ferrotitan_ext::store::{Store, TcpStoreOptions};
use ferrotitan_mesh::{Degrees, Grid, Mesh};
use tch::Device;

use super::c10d::C10d;
pub use super::environment::Environment;
use super::watch::{self, Watch};
use super::witness::Witness;
use crate::{Backend, BoxError, DeviceMesh, Error, Members, Recorder, Result, Transport};

/// How ranks connect and wait.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a rank waits for all others to connect before it gives up.
    pub connect_timeout: Duration,
    /// How long a rank waits for others in a collective before it gives up.
    pub timeout: Duration,
    /// Where this rank computes. When absent: its own GPU, the `LOCAL_RANK`th, where there is one and NCCL works; else
    /// the CPU.
    pub device: Option<Device>,
    /// The network interface that Gloo listens on, such as `eth0`. When absent, it listens where `hostname` leads.
    pub interface: Option<String>,
    /// The name or address under which others reach this machine. When absent: the loopback address if the store is on
    /// it, else what this machine's name resolves to.
    pub hostname: Option<String>,
    /// How many events the recorder keeps.
    pub recorder_capacity: usize,
    /// Whether ranks compare what they are about to call before every collective, so that a mismatch is an error at
    /// once and not a hang or a wrong result. Every collective then costs another, and waits for all ranks to start it.
    pub verify: bool,
    /// What to do when another rank has failed, before the connections of this one are broken for it.
    pub on_failure: Option<OnFailure>,
}

/// Something to be done, on a thread of its own, once another rank has failed: with that rank, and why it failed.
#[derive(Clone)]
pub struct OnFailure(Arc<Action>);

type Action = dyn Fn(usize, &str) + Send + Sync;

impl OnFailure {
    /// This, to be done.
    pub fn new(what: impl Fn(usize, &str) + Send + Sync + 'static) -> Self {
        OnFailure(Arc::new(what))
    }

    pub(super) fn tell(&self, rank: usize, reason: &str) {
        (self.0)(rank, reason);
    }
}

impl fmt::Debug for OnFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnFailure")
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            connect_timeout: Duration::from_secs(300),
            timeout: Duration::from_secs(600),
            device: None,
            interface: None,
            hostname: None,
            recorder_capacity: Recorder::CAPACITY,
            verify: false,
            on_failure: None,
        }
    }
}

/// Connects this process to its world, as the environment describes it. All ranks call this together.
///
/// # Errors
/// [`Error::Environment`] with everything that is wrong with the variables; [`Error::Mesh`] when the degrees do not
/// multiply to the world size; [`Error::Connect`] when the ranks do not find each other in time.
pub fn connect(degrees: Degrees, options: &Options) -> Result<DeviceMesh> {
    let (place, store) = Place::find(degrees, options)?;
    connect_through(store, place.grid, place.device, options)
}

/// What the environment says of this rank, and what follows from it.
struct Place {
    grid: Grid,
    device: Device,
    /// Whether this process serves the store.
    serves: bool,
}

impl Place {
    /// Reads the environment, checks it against the degrees, and connects to the store, which is empty for this world.
    fn find(degrees: Degrees, options: &Options) -> Result<(Self, Store)> {
        let environment = Environment::read()?;
        let degrees = degrees.fit(Some(degrees.dp_shard), environment.world_size)?;
        let (rank, agent) = (environment.rank, environment.agent_attempt);
        let device = options.device.unwrap_or_else(|| device(environment.local_rank));
        let place = Place { grid: Grid::new(degrees, rank)?, device, serves: rank == 0 && agent.is_none() };
        tracing::info!("rank {rank} of {} computes on {device:?}", environment.world_size);
        let meeting_point = TcpStoreOptions {
            host: environment.master_addr,
            port: environment.master_port,
            is_server: place.serves,
            world_size: Some(environment.world_size),
            timeout: options.connect_timeout,
        };
        let store = Store::tcp(&meeting_point).map_err(|source| Error::Connect {
            group: "world".to_owned(),
            rank,
            source: format!("no store at {}:{}: {source}", meeting_point.host, meeting_point.port).into(),
        })?;
        Ok(match agent {
            // Where torchrun's own workers meet.
            Some(attempt) => (place, store.prefix(&format!("/worker/attempt_{attempt}"))),
            None => (place, store),
        })
    }
}

/// Connects a rank to its world through a store that all ranks share, and use for no other world.
///
/// # Errors
/// [`Error::Connect`] when the ranks do not find each other in time, with those that did not come.
pub fn connect_through(store: Store, grid: Grid, device: Device, options: &Options) -> Result<DeviceMesh> {
    let watch = Arc::new(Watch::new(store, grid.rank(), options.on_failure.clone()));
    let backend = Arc::new(Processes { watch, device, options: options.clone() });
    let recorder = Recorder::new(options.recorder_capacity);
    let connected = backend.meet(&grid).and_then(|()| DeviceMesh::new(grid, device, backend.clone(), recorder));
    if let Err(error) = &connected {
        backend.fail(grid.rank(), &error.to_string());
    }
    connected
}

/// Connects this process to its world, and runs `body`. When that fails or panics, the other ranks are told. Rank 0,
/// whose process serves the store, waits for the others for up to 30 s, or 3 s when a rank has failed.
///
/// # Errors
/// Those of [`connect`]; [`Error::RankFailed`] with this rank's own error.
///
/// # Panics
/// With the panic of `body`, if that panics.
pub fn run<T, E, F>(degrees: Degrees, options: &Options, body: F) -> Result<T>
where
    E: Into<BoxError>,
    F: FnOnce(DeviceMesh) -> Result<T, E>,
{
    let (place, store) = Place::find(degrees, options)?;
    let attempt = catch_unwind(AssertUnwindSafe(|| {
        let mesh = connect_through(store.clone(), place.grid, place.device, options)?;
        let ran = catch_unwind(AssertUnwindSafe(|| body(mesh.clone())));
        match ran {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                let source = error.into();
                mesh.fail(&source.to_string());
                Err(Error::RankFailed { rank: mesh.rank(), source })
            }
            Err(panic) => {
                mesh.fail("it panicked");
                resume_unwind(panic)
            }
        }
    }));
    let well = matches!(attempt, Ok(Ok(_)));
    leave(&store, &place, if well { PATIENCE.min(options.timeout) } else { FAREWELL });
    attempt.unwrap_or_else(|panic| resume_unwind(panic))
}

/// How long rank 0 waits for the others when it is done: what they still do then, they do without it.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long rank 0 waits for the others to read why a rank failed.
const FAREWELL: Duration = Duration::from_secs(3);

/// Says that this rank has left; rank 0, if it serves the store, waits until all have.
fn leave(store: &Store, place: &Place, mut patience: Duration) {
    let size = place.grid.world_size() as i64;
    if !place.serves {
        // The process of the store may stand still.
        let store = store.clone();
        watch::within(FAREWELL, move || store.add("left", 1));
        return;
    }
    let mut left = store.add("left", 1);
    let begun = Instant::now();
    while left.as_ref().is_ok_and(|&left| left < size) && begun.elapsed() < patience {
        thread::sleep(Duration::from_millis(20));
        if watch::word(store).is_some() {
            patience = patience.min(FAREWELL);
        }
        left = store.add("left", 0);
    }
}

/// The device of a machine's `local_rank`th rank: its own GPU if there is one, else the CPU.
pub fn device(local_rank: usize) -> Device {
    match nccl_available() {
        Ok(()) if local_rank < ferrotitan_ext::cuda::device_count() => Device::Cuda(local_rank),
        _ => Device::Cpu,
    }
}

#[derive(Debug)]
struct Processes {
    watch: Arc<Watch>,
    device: Device,
    options: Options,
}

impl Processes {
    /// Waits until all ranks have come to the store.
    fn meet(&self, grid: &Grid) -> Result<()> {
        let store = self.watch.store();
        let (rank, keys) = (grid.rank(), (0..grid.world_size()).map(|rank| format!("here/{rank}")).collect::<Vec<_>>());
        let refused = |source: BoxError| Error::Connect { group: "world".to_owned(), rank, source };
        store.set(&keys[rank], b"here").map_err(|error| refused(error.into()))?;
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        store.wait(&keys, self.options.connect_timeout).map_err(|error| {
            let missing = (0..keys.len()).filter(|&other| store.check(keys[other]).is_ok_and(|here| !here));
            let missing: Vec<_> = missing.map(|rank| rank.to_string()).collect();
            match missing.is_empty() {
                true => refused(error.into()),
                false => {
                    let seconds = self.options.connect_timeout.as_secs_f64();
                    refused(format!("these ranks did not come within {seconds} s: {}", missing.join(", ")).into())
                }
            }
        })
    }
}

impl Backend for Processes {
    fn join(&self, members: &Members) -> Result<Arc<dyn Transport>> {
        let Options { connect_timeout, timeout, interface, hostname, verify, .. } = self.options.clone();
        let (rank, size) = (members.index(), members.size());
        // Groups of one view have one name: their first rank tells them apart.
        let store = self.watch.store().prefix(&format!("group/{}/{}", members.name(), members.ranks()[0]));
        let joined = match self.device {
            Device::Cuda(_) => {
                ProcessGroup::nccl(&store, rank, size, &NcclOptions { timeout, ..NcclOptions::default() })
            }
            _ => {
                // One number for connecting and for operations, whose waits end by themselves when they should.
                let timeout = timeout.max(connect_timeout);
                ProcessGroup::gloo(&store, rank, size, &GlooOptions { timeout, interface, hostname })
            }
        };
        let group = Arc::new(joined.map_err(|error| match self.watch.failed() {
            Some((rank, reason)) => Error::PeerFailed { rank: Some(rank), reason },
            None => members.connect(error),
        })?);
        self.watch.add(&group);
        let witness = Witness::new(members.clone(), self.watch.clone(), timeout);
        Ok(Arc::new(C10d::new(group, self.device, witness, verify)))
    }

    fn fail(&self, rank: usize, reason: &str) {
        self.watch.announce(rank, reason);
    }
}
