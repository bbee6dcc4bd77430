//! The same over Gloo, the backend of processes, with its ranks on threads.

use std::thread;
use std::time::Duration;

use ferrotitan_ext::store::Store;
use ferrotitan_mesh::{Degrees, Grid};
use ferrotitan_pp::comm::processes;
use ferrotitan_pp::microbatches;
use ferrotitan_pp::schedule::Algorithm;
use tch::Device;

use crate::harness::{Case, Share, assert_same};

fn over_gloo(case: &Case) -> Vec<Share> {
    let store = Store::hash();
    let connect = processes::Options { timeout: Duration::from_secs(30), ..processes::Options::default() };
    let rank_main = |grid: Grid| {
        tch::set_num_threads(1);
        let mesh = processes::connect_through(store.clone(), grid, Device::Cpu, &connect).unwrap();
        let mut pipeline = case.pipeline(&mesh).unwrap();
        let parts = microbatches(&case.batch(), case.microbatches).unwrap();
        pipeline.evaluate(&parts).unwrap();
        let loss = pipeline.step(&parts, case.tokens()).unwrap();
        Share::new(&loss, &pipeline, &mesh)
    };
    let rank_main = &rank_main;
    thread::scope(|scope| {
        let grids = Grid::all(Degrees { pp: case.ranks, ..Degrees::default() }).unwrap();
        let ranks: Vec<_> = grids.map(|grid| scope.spawn(move || rank_main(grid))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn schedules_train_the_same_model() {
    for case in [
        Case::new(Algorithm::OneForwardOneBackward, 2, 1, 5),
        Case { tied: true, ..Case::new(Algorithm::Interleaved1F1B, 4, 2, 6) },
        Case { tied: true, ..Case::new(Algorithm::Zb1p, 3, 1, 2) },
        Case::new(Algorithm::ZbvZeroBubble, 2, 2, 4),
        Case::new(Algorithm::DualPipeV, 4, 2, 9),
    ] {
        assert_same(&over_gloo(&case), &case.alone(), 1.0, &format!("{case:?} over Gloo"));
    }
}
