//! A run: the ranks, and what each of them does from its first collective to its last.

mod compose;
mod corpus;
mod rank;
mod report;
#[cfg(feature = "pp")]
mod stages;
mod step;
mod validate;

use anyhow::Context as _;
use ferrotitan_comm::{BoxError, DeviceMesh, fake, processes, threads};
use ferrotitan_ext::cuda;
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
    // Before the ranks meet: to tokenize a large corpus takes longer than they would wait for each other. Processes of one
    // machine take turns at it by a lock.
    let corpora = Corpora::open(plan)?;
    match plan.comm.backend {
        Backend::Fake => rank::train(plan, &corpora, &fake::mesh(plan.degrees, 0, Device::Cpu)?),
        _ if plan.degrees.world_size() == 1 => {
            let device = if cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
            rank::train(plan, &corpora, &DeviceMesh::single(device))
        }
        Backend::Threads => as_threads(plan, &corpora),
        Backend::Processes => as_process(plan, &corpora),
    }
}

/// One copy of the data serves all ranks.
fn as_threads(plan: &Plan, corpora: &Corpora) -> anyhow::Result<()> {
    let options = threads::Options {
        timeout: plan.comm.init_timeout.max(plan.comm.train_timeout),
        recorder_capacity: plan.comm.trace_buffer,
        ..threads::Options::default()
    };
    threads::run(plan.degrees, &options, |mesh| {
        enter_rank(mesh.rank());
        rank::train(plan, corpora, &mesh).map_err(boxed)
    })?;
    Ok(())
}

fn as_process(plan: &Plan, corpora: &Corpora) -> anyhow::Result<()> {
    let options = processes::Options {
        connect_timeout: plan.comm.init_timeout,
        timeout: plan.comm.init_timeout.max(plan.comm.train_timeout),
        recorder_capacity: plan.comm.trace_buffer,
        ..processes::Options::default()
    };
    processes::run(plan.degrees, &options, |mesh| rank::train(plan, corpora, &mesh).map_err(boxed))?;
    Ok(())
}

fn boxed(error: anyhow::Error) -> BoxError {
    error.into_boxed_dyn_error()
}
