//! Ranks as processes, on one machine or several: c10d inside libtorch, with Gloo on the CPU and NCCL on CUDA.
//!
//! Ranks find each other through the environment that `torchrun` sets; see [`Environment`]. Rank 0 serves the store
//! where they meet, unless torchrun's agent does.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use ferrotitan_ext::process_group::{GlooOptions, NcclOptions, ProcessGroup, nccl_available};
use ferrotitan_ext::store::{Store, TcpStoreOptions};
use ferrotitan_mesh::{Degrees, Grid, Mesh};
use tch::Device;

use super::c10d::C10d;
pub use super::environment::Environment;
use super::witness::{self, Witness};
use crate::{Backend, BoxError, DeviceMesh, Error, Members, Recorder, Result, Transport};

/// How ranks connect and wait.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a rank waits for others, to connect and in every collective, before it gives up.
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
}

impl Default for Options {
    fn default() -> Self {
        Options {
            timeout: Duration::from_secs(600),
            device: None,
            interface: None,
            hostname: None,
            recorder_capacity: Recorder::CAPACITY,
            verify: false,
        }
    }
}

/// Connects this process to its world, as the environment describes it. All ranks call this together.
///
/// # Errors
/// [`Error::Environment`] with everything that is wrong with the variables; [`Error::Mesh`] when the degrees do not
/// multiply to the world size; [`Error::Connect`] when the ranks do not find each other in time.
pub fn connect(degrees: Degrees, options: &Options) -> Result<DeviceMesh> {
    let environment = Environment::read()?;
    let degrees = degrees.fit(Some(degrees.dp_shard), environment.world_size)?;
    let device = options.device.unwrap_or_else(|| device(environment.local_rank));
    let store = rendezvous(&environment, options.timeout)?;
    connect_through(store, Grid::new(degrees, environment.rank)?, device, options)
}

/// Connects a rank to its world through a store that all ranks share, and use for no other world.
///
/// # Errors
/// [`Error::Connect`] when the ranks do not find each other in time.
pub fn connect_through(store: Store, grid: Grid, device: Device, options: &Options) -> Result<DeviceMesh> {
    let backend = Arc::new(Processes { store, device, options: options.clone() });
    DeviceMesh::new(grid, device, backend, Recorder::new(options.recorder_capacity))
}

/// Connects this process to its world, and runs `body`. When that fails or panics, the other ranks are told.
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
    let mesh = connect(degrees, options)?;
    match catch_unwind(AssertUnwindSafe(|| body(mesh.clone()))) {
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
}

/// The device of a machine's `local_rank`th rank: its own GPU if there is one, else the CPU.
pub fn device(local_rank: usize) -> Device {
    match nccl_available() {
        Ok(()) if local_rank < ferrotitan_ext::cuda::device_count() => Device::Cuda(local_rank),
        _ => Device::Cpu,
    }
}

/// The store that the environment leads to, empty for this world.
fn rendezvous(environment: &Environment, timeout: Duration) -> Result<Store> {
    let options = TcpStoreOptions {
        host: environment.master_addr.clone(),
        port: environment.master_port,
        is_server: environment.rank == 0 && environment.agent_attempt.is_none(),
        world_size: Some(environment.world_size),
        timeout,
    };
    let store = Store::tcp(&options).map_err(|source| Error::Connect {
        group: "world".to_owned(),
        rank: environment.rank,
        source: format!("no store at {}:{}: {source}", options.host, options.port).into(),
    })?;
    Ok(match environment.agent_attempt {
        // Where torchrun's own workers meet.
        Some(attempt) => store.prefix(&format!("/worker/attempt_{attempt}")),
        None => store,
    })
}

#[derive(Debug)]
struct Processes {
    store: Store,
    device: Device,
    options: Options,
}

impl Backend for Processes {
    fn join(&self, members: &Members) -> Result<Arc<dyn Transport>> {
        let (rank, size, timeout) = (members.index(), members.size(), self.options.timeout);
        // Groups of one view have one name: their first rank tells them apart.
        let store = self.store.prefix(&format!("group/{}/{}", members.name(), members.ranks()[0]));
        let joined = match self.device {
            Device::Cuda(_) => ProcessGroup::nccl(&store, rank, size, &NcclOptions { timeout, ..NcclOptions::default() }),
            _ => {
                let (interface, hostname) = (self.options.interface.clone(), self.options.hostname.clone());
                ProcessGroup::gloo(&store, rank, size, &GlooOptions { timeout, interface, hostname })
            }
        };
        let group = joined.map_err(|error| members.connect(error))?;
        let witness = Witness::new(members.clone(), self.store.clone(), timeout);
        Ok(Arc::new(C10d::new(group, self.device, witness, self.options.verify)))
    }

    fn fail(&self, rank: usize, reason: &str) {
        witness::announce(&self.store, rank, reason);
    }
}
