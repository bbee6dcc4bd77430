//! What the activations of the debug model take, measured.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::sync::{Barrier, Mutex};
use std::time::Duration;

use ferrotitan_comm::threads;
use ferrotitan_ext::memory;
use ferrotitan_mesh::Degrees;
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{Batch, Materialize, Transform};
use ferrotitan_tp::{Options, Plan, TensorParallel};
use tch::{Device, Kind, Tensor};

/// Tokens: enough that activations outweigh what an allocator keeps for itself.
const SEQUENCE: i64 = 512;

/// What the process keeps between the forward and the backward pass of all ranks, for each rank, in bytes.
fn activations(config: &LlamaConfig, tp: usize, sequence: i64) -> f64 {
    let limits = threads::Options { timeout: Duration::from_secs(60), ..threads::Options::default() };
    let (barrier, resident) = (Barrier::new(tp), Mutex::new(Vec::new()));
    let measure = || {
        if barrier.wait().is_leader() {
            memory::trim();
            resident.lock().unwrap().push(memory::rss().unwrap() as f64);
        }
        barrier.wait();
    };
    threads::run(Degrees { tp, ..Degrees::default() }, &limits, |mesh| {
        let mut model = build(config)?;
        TensorParallel::new(mesh.clone(), Options::default(), Plan::llama(config)).apply(&mut model, &mesh)?;
        let how = Materialize { seed: 0, kind: Kind::Float, compute: None, device: Device::Cpu };
        model.materialize(&how, &mesh)?;
        let tokens = Tensor::arange(sequence, (Kind::Int64, Device::Cpu)).remainder(config.vocab_size as i64);
        let batch = Batch::new(tokens.unsqueeze(0), Some(tokens.flip([0]).unsqueeze(0)))?;
        // A first step brings up thread pools, packed buffers and gradients.
        model.forward(&batch)?.backward();
        measure();
        let loss = model.forward(&batch)?;
        measure();
        loss.backward();
        Ok::<_, ferrotitan_nn::Error>(())
    })
    .unwrap();
    let resident = resident.into_inner().unwrap();
    (resident[1] - resident[0]) / tp as f64
}

#[test]
fn activations_fall_with_the_degree() {
    let config = LlamaConfig::flavor("debugmodel", 2048).unwrap();
    let (whole, quarter) = (activations(&config, 1, SEQUENCE), activations(&config, 4, SEQUENCE));
    let ratio = quarter / whole;
    println!(
        "activations of a rank: {:.1} MB at degree 1, {:.1} MB at degree 4, ratio {ratio:.3}",
        whole / 1e6,
        quarter / 1e6
    );
    // Less than the tensors that must be kept would mean that nothing was measured: see how many a block keeps.
    let block = SEQUENCE as f64 * 4.0 * (6.0 * config.dim as f64 + 3.0 * config.hidden_dim as f64);
    assert!(whole > config.n_layers as f64 * block * 0.8, "{whole}");
    assert!(ratio > 0.2 && ratio < 0.35, "{ratio}");
}
