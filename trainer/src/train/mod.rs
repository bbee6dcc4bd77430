//! A run: the ranks, and what each of them does from its first collective to its last.

mod compose;
mod corpus;
mod rank;
mod report;
mod step;
mod validate;

use anyhow::Context as _;
use ferrotitan_comm::processes::Environment;
use ferrotitan_comm::{BoxError, DeviceMesh, fake, processes, threads};
use ferrotitan_mesh::Mesh as _;
use tch::Device;

use crate::metrics::enter_rank;
use crate::plan::{Backend, Plan};
use corpus::Corpora;

/// Trains to the end of the plan, as all ranks (threads), or as the one that the environment names (processes).
///
/// # Errors
/// The first failure of any rank.
pub fn run(plan: &Plan) -> anyhow::Result<()> {
    if plan.deterministic {
        ferrotitan_ext::library::set_deterministic(true);
    }
    std::fs::create_dir_all(&plan.dump_folder)
        .with_context(|| format!("cannot make job.dump_folder {}", plan.dump_folder.display()))?;
    match plan.comm.backend {
        Backend::Threads => as_threads(plan),
        Backend::Processes => as_process(plan),
        Backend::Fake => rank::train(plan, &Corpora::open(plan)?, &fake::mesh(plan.degrees, 0, Device::Cpu)?),
    }
}

fn as_threads(plan: &Plan) -> anyhow::Result<()> {
    // One copy of the data serves all ranks.
    let corpora = Corpora::open(plan)?;
    let options = threads::Options {
        timeout: plan.comm.init_timeout.max(plan.comm.train_timeout),
        recorder_capacity: plan.comm.trace_buffer,
        ..threads::Options::default()
    };
    threads::run(plan.degrees, &options, |mesh| {
        if mesh.world_size() > 1 {
            enter_rank(mesh.rank());
        }
        rank::train(plan, &corpora, &mesh).map_err(boxed)
    })?;
    Ok(())
}

fn as_process(plan: &Plan) -> anyhow::Result<()> {
    let options = processes::Options {
        timeout: plan.comm.init_timeout.max(plan.comm.train_timeout),
        recorder_capacity: plan.comm.trace_buffer,
        ..processes::Options::default()
    };
    let first = Environment::read()?.local_rank == 0;
    processes::run(plan.degrees, &options, |mesh| {
        let corpora = open_in_turn(plan, &mesh, first).map_err(boxed)?;
        rank::train(plan, &corpora, &mesh).map_err(boxed)
    })?;
    Ok(())
}

/// The first rank of each machine opens the corpus, and tokenizes it if need be; then the others find it done.
fn open_in_turn(plan: &Plan, mesh: &DeviceMesh, first: bool) -> anyhow::Result<Corpora> {
    let world = mesh.world();
    let mut corpora = None;
    for turn in [true, false] {
        let opened = if first == turn { Corpora::open(plan).map(Some) } else { Ok(None) };
        corpora = world.all_ok(opened.map_err(boxed))?.or(corpora);
    }
    corpora.context("no turn opened the corpus")
}

fn boxed(error: anyhow::Error) -> BoxError {
    error.into_boxed_dyn_error()
}
