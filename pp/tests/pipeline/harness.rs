//! Ranks that are threads.

use std::thread;
use std::time::Duration;

use ferrotitan_ext::store::Store;
use ferrotitan_mesh::{Degrees, Grid};
use ferrotitan_pp::comm::{BoxError, DeviceMesh, processes, threads};
use ferrotitan_pp::microbatches;
use tch::Device;

use crate::models::llama::{Case, Share};

pub(crate) fn options() -> threads::Options {
    threads::Options { timeout: Duration::from_secs(40), intra_op_threads: Some(1), ..threads::Options::default() }
}

pub(crate) fn run<T: Send>(ranks: usize, body: impl Fn(DeviceMesh) -> Result<T, BoxError> + Sync) -> Vec<T> {
    threads::run(Degrees { pp: ranks, ..Degrees::default() }, &options(), body).unwrap()
}

/// The same over Gloo, the backend of processes, with its ranks on threads.
pub(crate) fn run_over_gloo<T: Send>(ranks: usize, body: impl Fn(DeviceMesh) -> Result<T, BoxError> + Sync) -> Vec<T> {
    let store = Store::hash();
    let connect = processes::Options { timeout: Duration::from_secs(40), ..processes::Options::default() };
    let rank_main = |grid: Grid| {
        tch::set_num_threads(1);
        body(processes::connect_through(store.clone(), grid, Device::Cpu, &connect)?)
    };
    let rank_main = &rank_main;
    thread::scope(|scope| {
        let grids = Grid::all(Degrees { pp: ranks, ..Degrees::default() }).unwrap();
        let ranks: Vec<_> = grids.map(|grid| scope.spawn(move || rank_main(grid))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    })
}

/// One step of a Llama as a pipeline, on every rank.
pub(crate) fn pipelined(case: &Case) -> Vec<Share> {
    run(case.ranks, |mesh| {
        let mut pipeline = case.pipeline(&mesh)?;
        let loss = pipeline.step(&microbatches(&case.batch(), case.microbatches)?, case.tokens())?;
        Ok(Share::new(&loss, &pipeline, &mesh))
    })
}
