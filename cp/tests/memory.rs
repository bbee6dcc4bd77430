//! Peak memory of one rank, which falls with their number.
#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

use ferrotitan_comm::{DeviceMesh, fake};
use ferrotitan_cp::{Mask, Method, Sharding, attention};
use ferrotitan_ext::memory;
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::Documents;
use tch::{Device, Kind, Tensor};

const SEQ: usize = 8192;
const HEADS: i64 = 8;
const KV_HEADS: i64 = 2;
const FEATURES: i64 = 64;

/// The bytes that one rank of `ranks` needs above what it began with, alone in this process: its queries, keys and values,
/// attention forward and backward.
fn peak(ranks: usize, method: Method) -> u64 {
    let mesh = match ranks {
        1 => DeviceMesh::single(Device::Cpu),
        _ => fake::mesh(Degrees { cp: ranks, ..Degrees::default() }, ranks / 2, Device::Cpu).unwrap(),
    };
    let group = mesh.group(View::CP).unwrap();
    let sharding = Sharding::head_tail(SEQ, ranks).unwrap();
    memory::trim();
    // Sets the peak to the present.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory::rss().unwrap();
    let tokens = (SEQ / ranks) as i64;
    let leaf = |heads| {
        Tensor::randn([1, tokens, heads, FEATURES], (Kind::Float, Device::Cpu)).set_requires_grad(true)
    };
    // Two documents, for half the time.
    let mask = Mask::causal().within(Documents::from_lengths(vec![vec![SEQ as i64 / 2; 2]]).unwrap());
    let (q, k, v) = (leaf(HEADS), leaf(KV_HEADS), leaf(KV_HEADS));
    let out = attention(&q, &k, &v, &mask, &sharding, method, &group).unwrap();
    out.sum(Kind::Float).backward();
    memory::peak_rss().unwrap() - before
}

#[test]
fn falls_with_the_number_of_ranks() {
    tch::set_num_threads(1);
    // Libraries load, and threads start, before anything is measured.
    peak(8, Method::Ring);
    let alone = peak(1, Method::Ring) as f64;
    let scores = (SEQ * SEQ / 2) as f64 * HEADS as f64 * 4.0;
    assert!(alone < scores / 5.0, "one rank used {alone} bytes, its scores would take {scores}");
    let gathered = (SEQ as i64 * KV_HEADS * FEATURES * 2 * 4) as f64;
    for method in Method::ALL {
        for ranks in [2, 4] {
            let used = peak(ranks, method) as f64;
            // All-gather holds the keys and values of the whole sequence, and their gradients, for a while.
            let transient = if method == Method::AllGather { 3.0 * gathered } else { 0.0 };
            println!("{method} over {ranks}: {:.1} MiB, one rank {:.1} MiB", used / 1048576.0, alone / 1048576.0);
            let bound = 1.6 * alone / ranks as f64 + transient + (2 << 20) as f64;
            assert!(used < bound, "{method} over {ranks}: {used} bytes, more than {bound}; one rank {alone}");
        }
    }
}
