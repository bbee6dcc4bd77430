//! The same over Gloo: with ranks as threads that meet in a store, and with ranks as processes.

use std::env;
use std::net::TcpListener;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use ferrotitan_comm::{DeviceMesh, processes};
use ferrotitan_ext::store::Store;
use ferrotitan_mesh::{Degrees, Grid};
use ferrotitan_nn::llama::LlamaConfig;
use ferrotitan_tp::Options;
use tch::Device;

use crate::support::{HOW, Outcome, assert_parity, batch, config, divided, single, step};

/// Set in the processes that are ranks.
const IS_RANK: &str = "FERROTITAN_TP_TEST_RANK";

fn limits() -> processes::Options {
    let timeout = Duration::from_secs(30);
    processes::Options { timeout, connect_timeout: timeout, device: Some(Device::Cpu), ..processes::Options::default() }
}

fn run(config: &LlamaConfig, options: Options, mesh: &DeviceMesh) -> Outcome {
    let mut model = divided(config, mesh, options).unwrap();
    model.materialize(&HOW, mesh).unwrap();
    step(&mut model, &batch(2, 7, config.vocab_size as i64), mesh)
}

#[test]
fn gloo_gives_the_same() {
    for (tp, async_tp, sequence_parallel) in [(2, false, true), (4, true, true), (3, false, false)] {
        let config = config(8, if tp == 4 { 2 } else { 8 }, 21, 29);
        let options = Options { async_tp, sequence_parallel, ..Options::default() };
        let store = Store::hash();
        let rank_main = |grid| {
            tch::set_num_threads(1);
            run(&config, options, &processes::connect_through(store.clone(), grid, Device::Cpu, &limits()).unwrap())
        };
        let ranks: Vec<Outcome> = thread::scope(|scope| {
            let grids = Grid::all(Degrees { tp, ..Degrees::default() }).unwrap();
            let ranks: Vec<_> = grids.map(|grid| scope.spawn(move || rank_main(grid))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_parity(&single(&config, &batch(2, 7, 29)), &ranks);
    }
}

/// Ends what is still running when a test fails.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn ranks_may_be_processes() {
    const SIZE: usize = 3;
    if env::var_os(IS_RANK).is_some() {
        tch::set_num_threads(1);
        let config = config(8, 8, 21, 29);
        let degrees = Degrees { tp: SIZE, ..Degrees::default() };
        let body = |mesh: DeviceMesh| Ok::<_, ferrotitan_nn::Error>(run(&config, Options::default(), &mesh));
        let outcome = processes::run(degrees, &limits(), body).unwrap();
        return assert_parity(&single(&config, &batch(2, 7, 29)), &[outcome]);
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let (rank, size) = (rank.to_string(), SIZE.to_string());
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["processes::ranks_may_be_processes", "--exact", "--test-threads=1"]).env(IS_RANK, "1");
        command.env("RANK", &rank).env("LOCAL_RANK", &rank).env("WORLD_SIZE", &size).env("LOCAL_WORLD_SIZE", &size);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.spawn().unwrap()
    };
    let mut children = Children((0..SIZE).map(start).collect());
    let begun = Instant::now();
    for child in &mut children.0 {
        let status = loop {
            assert!(begun.elapsed() < Duration::from_secs(60), "a rank was still running after a minute");
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        assert!(status.success(), "a rank ended with {status}");
    }
}
