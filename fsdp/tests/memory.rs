//! What a rank holds: one test, since it measures its whole process.
#![allow(clippy::unwrap_used)]

mod model;

use ferrotitan_ext::{memory, storage};
use ferrotitan_fsdp::comm::{fake, threads};
use ferrotitan_fsdp::nn::llama::{LlamaConfig, build};
use ferrotitan_fsdp::nn::mesh::Degrees;
use ferrotitan_fsdp::nn::{Batch, Materialize};
use ferrotitan_fsdp::tch::{Device, Kind, Tensor};
use ferrotitan_fsdp::{Fsdp, Options};
use ferrotitan_optim::{AdamW, AdamWOptions};
use model::rank_options;

const HOW: Materialize = Materialize { seed: 0, kind: Kind::Float, compute: None, device: Device::Cpu };

fn config(dim: usize, n_layers: usize) -> LlamaConfig {
    let flavor = LlamaConfig::flavor("debugmodel", 512).unwrap();
    LlamaConfig { dim, n_layers, n_heads: 8, n_kv_heads: 8, hidden_dim: 3 * dim, ..flavor }
}

/// The bytes behind tensors, each storage once.
fn bytes(tensors: &[Tensor]) -> usize {
    let mut seen: Vec<&Tensor> = Vec::new();
    for tensor in tensors.iter().filter(|tensor| tensor.numel() > 0) {
        if !seen.iter().any(|other| storage::shares_storage(other, tensor)) {
            seen.push(tensor);
        }
    }
    seen.iter().map(|tensor| storage::nbytes(tensor)).sum()
}

/// Parameters, gradients and optimizer state of each rank after a step, in bytes.
fn state(degrees: Degrees) -> Vec<usize> {
    let ran = threads::run(degrees, &rank_options(), |mesh| {
        let mut model = build(&config(64, 2)).unwrap();
        let handle = Fsdp::new(&mesh, Options::default()).attach(&mut model)?;
        model.materialize(&HOW, &mesh).unwrap();
        let tokens = Tensor::arange(32, (Kind::Int64, Device::Cpu)).view([2, 16]);
        let batch = Batch::new(tokens.shallow_clone(), Some(tokens)).unwrap();
        let mut optimizer = AdamW::new(model.parameters(), AdamWOptions::default(), &[]).unwrap();
        model.forward(&batch).unwrap().backward();
        handle.finish_backward()?;
        optimizer.step(1.0).unwrap();
        let mut held = Vec::new();
        for parameter in model.parameters() {
            held.extend([
                parameter.local().unwrap(),
                parameter.gradient().unwrap().unwrap(),
                parameter.leaf().unwrap(),
            ]);
        }
        held.extend(optimizer.state().flat_map(|m| [m.exp_avg.shallow_clone(), m.exp_avg_sq.shallow_clone()]));
        Ok::<_, ferrotitan_fsdp::Error>(bytes(&held))
    });
    ran.unwrap()
}

#[test]
fn a_rank_holds_its_part() {
    // First, while the process is small: one rank of eight makes its shards, and never more than a unit beside them.
    let wide = config(768, 8);
    let mesh = fake::mesh(Degrees { dp_shard: 8, ..Degrees::default() }, 3, Device::Cpu).unwrap();
    let mut large = build(&wide).unwrap();
    let handle = Fsdp::new(&mesh, Options::default()).attach(&mut large).unwrap();
    memory::trim();
    let before = memory::peak_rss().unwrap() as usize;
    large.materialize(&HOW, &mesh).unwrap();
    let peak = memory::peak_rss().unwrap() as usize - before;
    let (all, block) = (4 * wide.parameters(), 4 * (4 * 768 * 768 + 3 * 768 * 3 * 768));
    assert!(all > 200 << 20, "too small to be seen");
    assert!(peak < all / 8 + block, "{peak} bytes beside {} of shards and {block} of a block", all / 8);

    // With its units gathered in turn, it holds at most two of them.
    let tokens = Tensor::arange(8, (Kind::Int64, Device::Cpu)).view([1, 8]);
    large.forward(&Batch::new(tokens.shallow_clone(), Some(tokens)).unwrap()).unwrap().backward();
    handle.finish_backward().unwrap();
    assert_eq!((handle.stats().peak, handle.stats().gathered), (2, 0));
    drop(large);

    let whole = state(Degrees::default())[0];
    for ranks in [2, 4, 8] {
        for held in state(Degrees { dp_shard: ranks, ..Degrees::default() }) {
            let ratio = held as f64 * ranks as f64 / whole as f64;
            assert!((0.95..1.05).contains(&ratio), "{ranks} ranks: {ratio}");
        }
    }
    let hybrid = state(Degrees { dp_shard: 2, dp_replicate: 2, ..Degrees::default() })[0];
    assert!((0.95..1.05).contains(&(hybrid as f64 * 2.0 / whole as f64)));
}
