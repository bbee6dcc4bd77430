//! What sharding costs: tokens a second of the debug model, fully sharded over two ranks, against replicated on two.
//!
//! Steps of the two alternate, so that whatever else the machine does falls on both; medians are compared. First with
//! ranks as threads, then as processes over Gloo. Run with `cargo bench -p ferrotitan-fsdp`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::env;
use std::process::{Command, Stdio, exit};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use ferrotitan_ext::autograd;
use ferrotitan_ext::store::{Store, TcpStoreOptions};
use ferrotitan_fsdp::comm::{DeviceMesh, processes, threads};
use ferrotitan_fsdp::nn::llama::{LlamaConfig, build};
use ferrotitan_fsdp::nn::mesh::{Degrees, Grid};
use ferrotitan_fsdp::nn::{Batch, Materialize, Model};
use ferrotitan_fsdp::tch::{self, Device, Kind, Tensor};
use ferrotitan_fsdp::{Fsdp, Handle, Options};
use ferrotitan_optim::{AdamW, AdamWOptions};

const RANKS: usize = 2;
const BATCH: i64 = 2;
const SEQ: i64 = 256;
const VOCABULARY: usize = 2048;
const STEPS: usize = 30;
const WARM_UP: usize = 3;

/// How a rank process is told who it is: `rank:port`.
const RANK: &str = "FERROTITAN_FSDP_BENCH_RANK";

fn main() {
    // `cargo test --benches` runs this too, to see whether it runs at all.
    let steps = if env::args().any(|argument| argument == "--bench") { STEPS } else { 1 };
    match env::var(RANK) {
        Ok(told) => rank_process(&told, steps),
        Err(_) => {
            as_threads(steps);
            as_processes();
        }
    }
}

/// A model in training on one rank.
struct Training {
    model: Model,
    handle: Handle,
    optimizer: AdamW,
    batch: Batch,
}

impl Training {
    fn new(mesh: &DeviceMesh) -> Self {
        let mut model = build(&LlamaConfig::flavor("debugmodel", VOCABULARY).unwrap()).unwrap();
        let handle = Fsdp::new(mesh, Options::default()).attach(&mut model).unwrap();
        let how = Materialize { seed: 0, kind: Kind::Float, compute: None, device: Device::Cpu };
        model.materialize(&how, mesh).unwrap();
        let optimizer = AdamW::new(model.parameters(), AdamWOptions::default(), &[]).unwrap();
        let tokens =
            Tensor::arange(BATCH * SEQ, (Kind::Int64, Device::Cpu)).remainder(VOCABULARY as i64).view([BATCH, SEQ]);
        let batch = Batch::new(tokens.shallow_clone(), Some(tokens)).unwrap();
        Self { model, handle, optimizer, batch }
    }

    /// One step, from a moment when all ranks are ready.
    fn step(&mut self, mesh: &DeviceMesh) -> Duration {
        mesh.world().barrier().unwrap();
        let begun = Instant::now();
        self.optimizer.clear_gradients().unwrap();
        let loss = self.model.forward(&self.batch).unwrap() / (BATCH * SEQ * RANKS as i64) as f64;
        autograd::backward(&[loss], &[], false).unwrap();
        self.handle.finish_backward().unwrap();
        self.optimizer.step(1.0).unwrap();
        begun.elapsed()
    }
}

fn replicated() -> Degrees {
    Degrees { dp_replicate: RANKS, ..Degrees::default() }
}

fn sharded() -> Degrees {
    Degrees { dp_shard: RANKS, ..Degrees::default() }
}

/// Two worlds of threads, of which one waits while the other steps.
fn as_threads(steps: usize) {
    let turn = Barrier::new(2 * RANKS);
    let world = |degrees, own: usize| {
        let ran = threads::run(degrees, &threads::Options::default(), |mesh| {
            let mut training = Training::new(&mesh);
            let mut times = Vec::new();
            for step in 0..steps + WARM_UP {
                for whose in 0..2 {
                    turn.wait();
                    if whose == own {
                        let time = training.step(&mesh);
                        times.extend((step >= WARM_UP).then_some(time));
                    }
                }
            }
            Ok::<_, ferrotitan_fsdp::Error>(times)
        });
        ran.unwrap_or_else(|error| {
            // The other world would wait for its turn forever.
            println!("{error}");
            exit(1)
        })
    };
    let times = thread::scope(|scope| {
        let sharded = scope.spawn(|| world(sharded(), 1));
        [world(replicated(), 0), sharded.join().unwrap()].map(|mut ranks| ranks.swap_remove(0))
    });
    report("threads", times);
}

/// Starts the ranks, and waits for them.
fn as_processes() {
    let options = |port, is_server| store_options(port, is_server);
    let store = Store::tcp(&options(0, true)).unwrap();
    let port = store.port().unwrap();
    let start = |rank: usize| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(env::args().skip(1)).env(RANK, format!("{rank}:{port}")).stdin(Stdio::null());
        command.spawn().unwrap()
    };
    let ranks: Vec<_> = (0..RANKS).map(start).collect();
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success(), "a rank failed");
    }
}

fn store_options(port: u16, is_server: bool) -> TcpStoreOptions {
    let timeout = Duration::from_secs(60);
    TcpStoreOptions { host: "127.0.0.1".into(), port, is_server, world_size: None, timeout }
}

/// One rank of two worlds of the same processes, whose steps alternate.
fn rank_process(told: &str, steps: usize) {
    let (rank, port) = told.split_once(':').unwrap();
    let (rank, port) = (rank.parse().unwrap(), port.parse().unwrap());
    tch::set_num_threads(1);
    let store = Store::tcp(&store_options(port, false)).unwrap();
    let options = processes::Options {
        timeout: Duration::from_secs(120),
        hostname: Some("127.0.0.1".into()),
        ..processes::Options::default()
    };
    let connect = |degrees, name| {
        let grid = Grid::new(degrees, rank).unwrap();
        processes::connect_through(store.prefix(name), grid, Device::Cpu, &options).unwrap()
    };
    let meshes = [connect(replicated(), "replicated"), connect(sharded(), "sharded")];
    let mut trainings = [Training::new(&meshes[0]), Training::new(&meshes[1])];
    let mut times = [Vec::new(), Vec::new()];
    for step in 0..steps + WARM_UP {
        for ((mesh, training), times) in meshes.iter().zip(&mut trainings).zip(&mut times) {
            let time = training.step(mesh);
            if step >= WARM_UP {
                times.push(time);
            }
        }
    }
    meshes[0].world().barrier().unwrap();
    if rank == 0 {
        report("processes", times);
    }
}

fn report(ranks: &str, times: [Vec<Duration>; 2]) {
    let tokens = (BATCH * SEQ) as f64 * RANKS as f64;
    let speeds = times.map(|mut times| {
        times.sort_unstable();
        tokens / times[times.len() / 2].as_secs_f64()
    });
    let [replicated, sharded] = speeds;
    println!(
        "{ranks}: replicated {replicated:.0} tokens/s, sharded {sharded:.0} tokens/s, ratio {:.3}",
        sharded / replicated
    );
}
