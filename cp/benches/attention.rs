//! Attention of a sequence of 8192 tokens, forward and backward: two ranks against one, each on one core.
//!
//! Printed: the median time, its ratio to one rank's (a half is ideal), and the peak memory of a rank. Runs of the methods
//! alternate, so that a busy machine is busy for all of them.
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
const RUNS: [(usize, Method); 4] = [(1, Method::Ring), (2, Method::Ring), (2, Method::AllGather), (2, Method::AllToAll)];

/// The slowest rank's time, and the MiB of a rank above what the process began with, if the system tells.
fn measure(ranks: usize, method: Method) -> (Duration, Option<f64>) {
    memory::trim();
    // Sets the peak to the present, on Linux.
    let reset = std::fs::write("/proc/self/clear_refs", "5").is_ok();
    let before = memory::rss();
    let options = Options { intra_op_threads: Some(1), ..Options::default() };
    let times = run(Degrees { cp: ranks, ..Degrees::default() }, &options, |mesh| -> Result<Duration> {
        let group = mesh.group(View::CP)?;
        let sharding = Sharding::head_tail(SEQ, ranks)?;
        let random = |heads| Tensor::randn([1, (SEQ / ranks) as i64, heads, FEATURES], (Kind::Float, Device::Cpu));
        let leaf = |heads| random(heads).set_requires_grad(true);
        let (q, k, v, grad) = (leaf(HEADS), leaf(KV_HEADS), leaf(KV_HEADS), random(HEADS));
        group.barrier()?;
        let start = Instant::now();
        let out = attention(&q, &k, &v, &Mask::causal(), &sharding, method, &group)?;
        ferrotitan_ext::autograd::backward(&[out], &[Some(grad)], false)?;
        Ok(start.elapsed())
    });
    let above = |before| memory::peak_rss().map(|peak| peak.saturating_sub(before) as f64 / 1048576.0 / ranks as f64);
    (times.unwrap().into_iter().max().unwrap_or_default(), before.filter(|_| reset).and_then(above))
}

fn main() {
    measure(2, Method::Ring);
    let mut seen = RUNS.map(|_| (Vec::new(), None::<f64>));
    for _ in 0..REPETITIONS {
        for ((ranks, method), (times, highest)) in RUNS.into_iter().zip(&mut seen) {
            let (time, peak) = measure(ranks, method);
            times.push(time);
            *highest = peak.max(*highest);
        }
    }
    let median = |times: &[Duration]| {
        let mut times = times.to_vec();
        times.sort();
        times[times.len() / 2].as_secs_f64()
    };
    let alone = median(&seen[0].0);
    println!("{SEQ} tokens, {HEADS} heads, {KV_HEADS} key-value heads of {FEATURES}, fp32, causal, forward and backward");
    for ((ranks, method), (times, peak)) in RUNS.into_iter().zip(&seen) {
        let (time, peak) = (median(times), peak.map_or("unknown".into(), |mib| format!("{mib:.0} MiB")));
        println!("{method:>9}, ranks {ranks}: {time:6.2} s, {:.2} of one rank's, peak {peak} a rank", time / alone);
    }
}
