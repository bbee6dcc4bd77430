//! The same over Gloo, the backend of processes, with ranks as threads that meet in a store.

use std::thread;
use std::time::Duration;

use ferrotitan_comm::processes;
use ferrotitan_cp::{Balance, ContextOptions, ContextParallel, Method};
use ferrotitan_ext::store::Store;
use ferrotitan_mesh::{Degrees, Grid, View};
use tch::Device;

use crate::alone::divided;
use crate::support::{alone, batch, packed};

#[test]
fn gloo_gives_the_same() {
    let expected = alone(&batch(packed()));
    let timeout = Duration::from_secs(30);
    let limits = processes::Options { timeout, connect_timeout: timeout, ..processes::Options::default() };
    for ranks in [2, 3] {
        for method in Method::ALL {
            let store = Store::hash();
            let rank_main = |grid: Grid| {
                tch::set_num_threads(1);
                let mesh = processes::connect_through(store.clone(), grid, Device::Cpu, &limits).unwrap();
                let options = ContextOptions { method, balance: Balance::HeadTail };
                let context = ContextParallel::new(&mesh, options).unwrap();
                let mut model = divided(&mesh, &context, false);
                let loss = model.forward(&context.shard_batch(&batch(packed())).unwrap()).unwrap();
                loss.backward();
                let group = mesh.group(View::LOSS).unwrap();
                expected.assert_met(&loss, &model, &mesh, Some(&group), &format!("{method} on {ranks} ranks of Gloo"));
            };
            let rank_main = &rank_main;
            thread::scope(|scope| {
                let grids = Grid::all(Degrees { cp: ranks, ..Degrees::default() }).unwrap();
                let ranks: Vec<_> = grids.map(|grid| scope.spawn(move || rank_main(grid))).collect();
                ranks.into_iter().for_each(|rank| rank.join().unwrap());
            });
        }
    }
}
