//! Attention of a sequence of 8192 tokens, forward and backward: two ranks against one, each on one core.
//!
//! Printed: the median time, that which the rank had a core for (on a machine that does other things too, the one that
//! means something), the ratios to one rank's (a half is ideal), and the peak memory of a rank. Runs alternate, so that a
//! busy machine is busy for all of them.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use ferrotitan_comm::threads::{Options, run};
use ferrotitan_cp::{Mask, Method, Result, Sharding, attention};
use ferrotitan_ext::memory;
use ferrotitan_mesh::{Degrees, View};
use tch::{Device, Kind, Tensor};

const SEQ: usize = 8192;
const HEADS: i64 = 8;
const KV_HEADS: i64 = 2;
const FEATURES: i64 = 64;
const REPETITIONS: usize = 3;

/// What is measured: how many ranks, and how they share.
const RUNS: [(usize, Method); 4] =
    [(1, Method::Ring), (2, Method::Ring), (2, Method::AllGather), (2, Method::AllToAll)];

/// How long this thread has had a core, on Linux; zero elsewhere.
fn on_core() -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(told.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok()).unwrap_or(0))
}

/// The slowest rank's time, how long the busiest had a core, and the MiB of a rank above what the process began with, if
/// the system tells.
fn measure(ranks: usize, method: Method) -> (Duration, Duration, Option<f64>) {
    memory::trim();
    // Sets the peak to the present, on Linux.
    let reset = std::fs::write("/proc/self/clear_refs", "5").is_ok();
    let before = memory::rss();
    let options = Options { intra_op_threads: Some(1), ..Options::default() };
    let times = run(Degrees { cp: ranks, ..Degrees::default() }, &options, |mesh| -> Result<(Duration, Duration)> {
        let group = mesh.group(View::CP)?;
        let sharding = Sharding::head_tail(SEQ, ranks)?;
        let random = |heads| Tensor::randn([1, (SEQ / ranks) as i64, heads, FEATURES], (Kind::Float, Device::Cpu));
        let leaf = |heads| random(heads).set_requires_grad(true);
        let (q, k, v, grad) = (leaf(HEADS), leaf(KV_HEADS), leaf(KV_HEADS), random(HEADS));
        group.barrier()?;
        let (start, core) = (Instant::now(), on_core());
        let out = attention(&q, &k, &v, &Mask::causal(), &sharding, method, &group)?;
        ferrotitan_ext::autograd::backward(&[out], &[Some(grad)], false)?;
        Ok((start.elapsed(), on_core() - core))
    });
    let above = |before| memory::peak_rss().map(|peak| peak.saturating_sub(before) as f64 / 1048576.0 / ranks as f64);
    let peak = before.filter(|_| reset).and_then(above);
    let (times, cores): (Vec<_>, Vec<_>) = times.unwrap().into_iter().unzip();
    (times.into_iter().max().unwrap_or_default(), cores.into_iter().max().unwrap_or_default(), peak)
}

fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn main() {
    // `cargo test --benches` asks whether it runs, not how fast.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    measure(2, Method::Ring);
    let mut seen = RUNS.map(|_| (Vec::new(), Vec::new(), None::<f64>));
    for _ in 0..REPETITIONS {
        for ((ranks, method), (times, cores, highest)) in RUNS.into_iter().zip(&mut seen) {
            let (time, core, peak) = measure(ranks, method);
            times.push(time);
            cores.push(core);
            *highest = peak.into_iter().chain(*highest).reduce(f64::max);
        }
    }
    let (alone, alone_core) = (median(&seen[0].0), median(&seen[0].1));
    println!(
        "{SEQ} tokens, {HEADS} heads, {KV_HEADS} key-value heads of {FEATURES}, fp32, causal, forward and backward"
    );
    for ((ranks, method), (times, cores, peak)) in RUNS.into_iter().zip(&seen) {
        let (time, core) = (median(times), median(cores));
        let peak = peak.map_or("unknown".into(), |mib| format!("{mib:.0} MiB"));
        println!(
            "{:>9}, ranks {ranks}: {time:5.2} s ({:.2} of one rank's), on a core {core:5.2} s ({:.2}), peak {peak} a rank",
            method.name(),
            time / alone,
            core / alone_core
        );
    }
}
