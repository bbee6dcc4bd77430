//! What activation checkpointing leaves between the forward and the backward pass, measured.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use ferrotitan_ext::memory;
use ferrotitan_mesh::Grid;
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{ActivationCheckpoint, Batch, Layer, Materialize};
use tch::{Device, Kind, Tensor};

/// Tokens: enough that activations outweigh what an allocator keeps for itself.
const SEQUENCE: i64 = 1024;

/// What the process keeps between the passes, in bytes.
fn held(wrap: fn(Box<dyn Layer>) -> Box<dyn Layer>) -> f64 {
    // Few logits, since they are not what is checkpointed.
    let config = LlamaConfig::flavor("debugmodel", 64).unwrap();
    let mut model = build(&config).unwrap();
    for named in model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers.")) {
        named.wrap(wrap);
    }
    let how = Materialize { seed: 0, kind: Kind::Float, compute: None, device: Device::Cpu };
    model.materialize(&how, &Grid::single()).unwrap();
    let tokens = Tensor::arange(SEQUENCE, (Kind::Int64, Device::Cpu)).remainder(64).unsqueeze(0);
    let batch = Batch::new(tokens.shallow_clone(), Some(tokens)).unwrap();
    // A first step brings up thread pools, packed buffers and gradients.
    model.forward(&batch).unwrap().backward();
    let resident = || {
        memory::trim();
        memory::rss().unwrap() as f64
    };
    let before = resident();
    let loss = model.forward(&batch).unwrap();
    let after = resident();
    loss.backward();
    after - before
}

#[test]
fn less_is_held_by_operation_and_least_in_full() {
    let none = held(|layer| layer);
    let by_operation = held(|layer| Box::new(ActivationCheckpoint::by_operation(layer)));
    let full = held(|layer| Box::new(ActivationCheckpoint::new(layer)));
    println!("MB held: none {:.1}, by operation {:.1}, full {:.1}", none / 1e6, by_operation / 1e6, full / 1e6);
    // A block's input; and by operation the outputs of wq, wv, attention with its log-sum-exp, w1 and w2.
    let config = LlamaConfig::flavor("debugmodel", 64).unwrap();
    let tensors = |numbers: usize| (SEQUENCE as usize * numbers * 4 * config.n_layers) as f64;
    let input = tensors(config.dim);
    let kept = tensors(4 * config.dim + config.n_heads + config.hidden_dim);
    assert!(full > 0.8 * input && full < 1.8 * input, "{full} of {input}");
    assert!(by_operation > 0.8 * (input + kept) && by_operation < 1.2 * (input + kept), "{by_operation}, {kept}");
    assert!(none > 1.5 * by_operation, "{none}");
}
