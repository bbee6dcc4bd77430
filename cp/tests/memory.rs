//! Peak memory of a rank, which falls with their number.
#![allow(clippy::unwrap_used, clippy::print_stdout)]
#![cfg(target_os = "linux")]

use std::process::Command;
use std::time::Duration;

use ferrotitan_comm::threads::{Options, run};
use ferrotitan_cp::{Mask, Method, Result, Sharding, attention};
use ferrotitan_ext::memory;
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::Documents;
use tch::{Device, Kind, Tensor};

const SEQ: usize = 4096;
const HEADS: i64 = 8;
const KV_HEADS: i64 = 2;
const FEATURES: i64 = 64;

/// The MiB that one of `ranks` needs on average above what the process began with: its queries, keys and values, attention
/// forward and backward. All ranks are threads of this process, whose peak is divided by their number.
fn peak(ranks: usize, method: Method) -> f64 {
    memory::trim();
    // Sets the peak to the present.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory::rss().unwrap();
    // Two documents, for half the time.
    let mask = Mask::causal().within(Documents::from_lengths(vec![vec![SEQ as i64 / 2; 2]]).unwrap());
    let options = Options { intra_op_threads: Some(1), timeout: Duration::from_secs(30), ..Options::default() };
    run(Degrees { cp: ranks, ..Degrees::default() }, &options, |mesh| -> Result<()> {
        let sharding = Sharding::head_tail(SEQ, ranks)?;
        let tokens = (SEQ / ranks) as i64;
        let leaf =
            |heads| Tensor::randn([1, tokens, heads, FEATURES], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let (q, k, v) = (leaf(HEADS), leaf(KV_HEADS), leaf(KV_HEADS));
        let out = attention(&q, &k, &v, &mask, &sharding, method, &mesh.group(View::CP)?)?;
        out.sum(Kind::Float).backward();
        Ok(())
    })
    .unwrap();
    (memory::peak_rss().unwrap() - before) as f64 / 1048576.0 / ranks as f64
}

/// The measurement runs in a process of its own, where the allocator gives back at once what is freed: otherwise what it
/// keeps for later would count, and differ from run to run.
#[test]
fn falls_with_the_number_of_ranks() {
    const RETURNS: &str = "MALLOC_MMAP_THRESHOLD_";
    if std::env::var_os(RETURNS).is_some() {
        return measure();
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    let output =
        again.args(["--exact", "falls_with_the_number_of_ranks", "--nocapture"]).env(RETURNS, "65536").output();
    let output = output.unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}");
    assert!(output.status.success() && out.contains("ulysses over 4"), "{out}\n{err}");
}

fn measure() {
    // Libraries load, and threads start, before anything is measured.
    peak(8, Method::Ring);
    let alone = peak(1, Method::Ring);
    let scores = (SEQ * SEQ / 2) as f64 * HEADS as f64 * 4.0 / 1048576.0;
    assert!(alone < scores / 5.0, "one rank used {alone:.1} MiB, its scores would take {scores:.1}");
    // Of the whole sequence.
    let kv = (SEQ as i64 * KV_HEADS * FEATURES * 2 * 4) as f64 / 1048576.0;
    for method in Method::ALL {
        for ranks in [2, 4] {
            let used = peak(ranks, method);
            let bound = match method {
                // Keys, values and their gradients for this step, the next and the last.
                Method::Ring => 1.5 * alone / ranks as f64,
                // The keys and values of the whole sequence, and their gradients, for a while.
                Method::AllGather => 1.3 * alone / ranks as f64 + 2.0 * kv,
                // What is exchanged, before and after.
                _ => 1.9 * alone / ranks as f64,
            };
            println!("{method} over {ranks}: {used:.1} MiB a rank, one rank {alone:.1} MiB");
            assert!(
                used < bound,
                "{method} over {ranks}: {used:.1} MiB a rank, more than {bound:.1}; one rank {alone:.1}"
            );
        }
    }
}
