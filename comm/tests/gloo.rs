//! The processes backend with its ranks on threads of one process, which meet in a store in memory.

#![allow(clippy::unwrap_used, missing_docs)]

use std::thread;
use std::time::Duration;

use ferrotitan_comm::conformance::{self, Ranks, Verdict};
use ferrotitan_comm::mesh::{Degrees, Grid, Mesh};
use ferrotitan_comm::tch::Device;
use ferrotitan_comm::{DeviceMesh, Error, Result, processes};
use ferrotitan_ext::store::Store;

struct Gloo {
    sizes: Vec<usize>,
    verify: bool,
}

impl Ranks for Gloo {
    fn sizes(&self) -> Vec<usize> {
        self.sizes.clone()
    }

    fn run(&self, degrees: Degrees, timeout: Duration, body: &(dyn Fn(&DeviceMesh) -> Verdict + Sync)) -> Result<()> {
        let store = Store::hash();
        let options = processes::Options { timeout, verify: self.verify, ..processes::Options::default() };
        let rank_main = |grid: Grid| -> Result<()> {
            ferrotitan_comm::tch::set_num_threads(1);
            let mesh = processes::connect_through(store.clone(), grid, Device::Cpu, &options)?;
            body(&mesh).map_err(|found| {
                mesh.fail(&found);
                Error::RankFailed { rank: grid.rank(), source: found.into() }
            })
        };
        thread::scope(|scope| {
            let rank_main = &rank_main;
            let ranks: Vec<_> = Grid::all(degrees)?.map(|grid| scope.spawn(move || rank_main(grid))).collect();
            ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
        })
    }

    fn short(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn detects_mismatch(&self) -> bool {
        self.verify
    }
}

#[test]
fn passes_the_suite() {
    conformance::all(&Gloo { sizes: vec![1, 2, 3, 4], verify: false }).unwrap();
}

#[test]
fn passes_the_suite_while_it_verifies() {
    conformance::all(&Gloo { sizes: vec![2], verify: true }).unwrap();
}
