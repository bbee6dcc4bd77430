//! A run: the ranks, and what each of them does from its first collective to its last.

#[cfg(feature = "checkpoint")]
mod checkpoint;
mod compose;
mod corpus;
#[cfg(feature = "telemetry")]
mod exporters;
#[cfg(not(feature = "telemetry"))]
#[path = "unexported.rs"]
mod exporters;
mod held;
mod progress;
mod rank;
mod report;
#[cfg(feature = "pp")]
mod stages;
mod step;
mod validate;
#[cfg(feature = "telemetry")]
pub mod watch;
#[cfg(not(feature = "telemetry"))]
#[path = "unwatched.rs"]
mod watch;

use anyhow::Context as _;
use ferrotitan_comm::{BoxError, DeviceMesh, fake, processes, threads};
use ferrotitan_ext::cuda;
use ferrotitan_mesh::Mesh as _;
use tch::Device;

use crate::launch;
use crate::metrics::enter_rank;
use crate::plan::{Backend, Plan};
use corpus::Corpora;
pub use exporters::Exporters;
use watch::Watch;

/// The target of spans: `telemetry` keeps those of this name.
const SPANS: &str = "ferrotitan::span";

/// Trains to the end of the plan, as all ranks (threads), or as the one that the environment names (processes).
///
/// # Errors
/// The first failure of any rank.
pub fn run(plan: &Plan, exporters: &Exporters) -> anyhow::Result<()> {
    if plan.deterministic {
        ferrotitan_ext::library::set_deterministic(true);
    }
    std::fs::create_dir_all(&plan.dump_folder)
        .with_context(|| format!("cannot make job.dump_folder {}", plan.dump_folder.display()))?;
    // Before the ranks meet: to tokenize a large corpus takes longer than they would wait for each other. Processes of one
    // machine take turns at it by a lock.
    let corpora = Corpora::open(plan)?;
    // The launcher is the first of its run, if there is one.
    let first = !launch::launched() && launch::Place::read()?.rank() == 0;
    let watch = Watch::new(&plan.comm, first)?;
    #[cfg(feature = "telemetry")]
    let watch = watch.shown(exporters.view());
    let run = Run { plan, corpora: &corpora, watch: &watch, exporters };
    let alone = |mesh: DeviceMesh| run.train(&mesh, &watch.join(&mesh));
    let ran = match plan.comm.backend {
        Backend::Fake => alone(fake::mesh(plan.degrees, 0, Device::Cpu)?),
        _ if plan.degrees.world_size() == 1 => {
            alone(DeviceMesh::single(if cuda::is_available() { Device::Cuda(0) } else { Device::Cpu }))
        }
        Backend::Threads => as_threads(&run),
        Backend::Processes => as_process(&run),
    };
    ran.map_err(|error| match watch.report().filter(|_| first) {
        Some(report) => error.context(report),
        None => error,
    })
}

/// What all ranks of a process share.
struct Run<'a> {
    plan: &'a Plan,
    corpora: &'a Corpora,
    watch: &'a Watch,
    exporters: &'a Exporters,
}

impl Run<'_> {
    /// Trains as one rank.
    fn train(&self, mesh: &DeviceMesh, watched: &watch::Rank) -> anyhow::Result<()> {
        let mut exporter = self.exporters.rank(self.plan, mesh)?;
        exporter.run(|exporter| rank::train(self.plan, self.corpora, mesh, watched, exporter))
    }
}

/// One copy of the data serves all ranks.
fn as_threads(run: &Run<'_>) -> anyhow::Result<()> {
    let Run { plan, watch, .. } = run;
    watch.on_signals();
    let options = threads::Options {
        timeout: plan.comm.init_timeout.max(plan.comm.train_timeout),
        recorder_capacity: plan.comm.trace_buffer,
        ..threads::Options::default()
    };
    threads::run(plan.degrees, &options, |mesh| {
        enter_rank(mesh.rank());
        let trained = watched(run, &mesh);
        if trained.is_err() {
            watch.end_soon();
        }
        trained
    })?;
    Ok(())
}

fn as_process(run: &Run<'_>) -> anyhow::Result<()> {
    let Run { plan, watch, .. } = run;
    watch.on_signals();
    let options = processes::Options {
        connect_timeout: plan.comm.init_timeout,
        timeout: plan.comm.init_timeout.max(plan.comm.train_timeout),
        recorder_capacity: plan.comm.trace_buffer,
        verify: plan.comm.verify,
        #[cfg(feature = "telemetry")]
        on_failure: Some(watch.on_failure()),
        ..processes::Options::default()
    };
    processes::run(plan.degrees, &options, |mesh| watched(run, &mesh))?;
    Ok(())
}

/// Trains as one rank of several, which leaves a record if it fails.
fn watched(run: &Run<'_>, mesh: &DeviceMesh) -> Result<(), BoxError> {
    let rank = run.watch.join(mesh);
    run.train(mesh, &rank).map_err(|error| {
        rank.failed(&format!("{error:#}"));
        error.into_boxed_dyn_error()
    })
}
