//! The same parity over Gloo, the backend of processes, with its ranks on threads.
#![allow(clippy::unwrap_used)]

mod model;

use std::thread;
use std::time::Duration;

use ferrotitan_ext::store::Store;
use ferrotitan_fsdp::comm::processes;
use ferrotitan_fsdp::nn::mesh::{Degrees, Grid};
use ferrotitan_fsdp::tch::{self, Device};
use ferrotitan_fsdp::{Fsdp, Options, Reshard};
use model::{Outcome, Training, alone, assert_close, merge, model, train};

fn over_gloo(training: &Training, degrees: Degrees, options: &Options) -> Outcome {
    let store = Store::hash();
    let connect = processes::Options { timeout: Duration::from_secs(30), ..processes::Options::default() };
    let rank_main = |grid: Grid| {
        tch::set_num_threads(1);
        let mesh = processes::connect_through(store.clone(), grid, Device::Cpu, &connect).unwrap();
        let mut model = model(training);
        let handle = Fsdp::new(&mesh, options.clone()).attach(&mut model).unwrap();
        model.materialize(&training.how, &mesh).unwrap();
        train(training, &mesh, &mut model, Some(&handle))
    };
    let rank_main = &rank_main;
    thread::scope(|scope| {
        let ranks: Vec<_> = Grid::all(degrees).unwrap().map(|grid| scope.spawn(move || rank_main(grid))).collect();
        merge(ranks.into_iter().map(|rank| rank.join().unwrap()).collect())
    })
}

#[test]
fn every_strategy_trains_the_same_model() {
    let one = Degrees::default();
    let cases = [
        (Degrees { dp_shard: 2, ..one }, Reshard::Default, 1),
        (Degrees { dp_shard: 3, ..one }, Reshard::Always, 2),
        (Degrees { dp_replicate: 2, ..one }, Reshard::Default, 1),
        (Degrees { dp_replicate: 2, dp_shard: 2, ..one }, Reshard::Never, 2),
        (Degrees { dp_shard: 4, ..one }, Reshard::Ranks(2), 1),
    ];
    for (degrees, reshard_after_forward, accumulation) in cases {
        for (checkpoint, tied) in [(false, false), (true, true)] {
            let training =
                Training { accumulation, checkpoint, tied, rows: 9, reduces_each: tied, ..Training::default() };
            let options = Options { reshard_after_forward, ..Options::default() };
            assert_close(&over_gloo(&training, degrees, &options), &alone(&training), 1e-10);
        }
    }
}
