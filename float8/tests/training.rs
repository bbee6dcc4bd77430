//! Training on real text: each recipe learns as bf16 does.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use ferrotitan_float8::comm::DeviceMesh;
use ferrotitan_float8::nn::llama::{LlamaConfig, build};
use ferrotitan_float8::nn::{Batch, Materialize};
use ferrotitan_float8::tch::{self, Device, Kind, Tensor};
use ferrotitan_float8::{Float8, Options, Recipe};
use ferrotitan_optim::{AdamW, AdamWOptions};

const STEPS: i64 = 200;
const ROWS: i64 = 8;
const SEQ: i64 = 64;

/// This repository's own prose and code, as bytes.
fn text() -> Tensor {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![own.join("README.md")];
    for folder in ["src", "tests"] {
        files.extend(std::fs::read_dir(own.join(folder)).unwrap().map(|entry| entry.unwrap().path()));
    }
    files.sort();
    let bytes: Vec<u8> =
        files.iter().filter(|path| path.is_file()).flat_map(|path| std::fs::read(path).unwrap()).collect();
    Tensor::from_slice(&bytes).to_kind(Kind::Int64)
}

/// The losses of a small model over the steps, each a mean over tokens.
fn losses(options: Option<Options>) -> Vec<f64> {
    tch::set_num_threads(1);
    let config = LlamaConfig {
        dim: 64,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        hidden_dim: 128,
        ..LlamaConfig::flavor("debugmodel", 256).unwrap()
    };
    let (mut model, mesh) = (build(&config).unwrap(), DeviceMesh::single(Device::Cpu));
    let handle = options.map(|options| Float8::new(options).attach(&mut model).unwrap());
    let how = Materialize { seed: 4, kind: Kind::Float, compute: Some(Kind::BFloat16), device: Device::Cpu };
    model.materialize(&how, &mesh).unwrap();
    let mut optimizer =
        AdamW::new(model.parameters(), AdamWOptions { lr: 3e-3, ..AdamWOptions::default() }, &[]).unwrap();
    let text = text();
    let windows = (text.numel() as i64 - 1) / SEQ;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        // Far apart in the text, another set each step.
        let start = |row: i64| (step * ROWS + row) * 7919 % windows * SEQ;
        let rows = |shift: i64| {
            Tensor::stack(&(0..ROWS).map(|row| text.narrow(0, start(row) + shift, SEQ)).collect::<Vec<_>>(), 0)
        };
        optimizer.clear_gradients().unwrap();
        let loss = model.forward(&Batch::new(rows(0), Some(rows(1))).unwrap()).unwrap() / (ROWS * SEQ);
        loss.backward();
        if let Some(handle) = &handle {
            handle.finish_gradients().unwrap();
        }
        optimizer.step((step + 1).min(20) as f64 / 20.0).unwrap();
        losses.push(loss.double_value(&[]));
    }
    losses
}

fn at_the_end(losses: &[f64]) -> f64 {
    let last = &losses[losses.len() - 20..];
    last.iter().sum::<f64>() / last.len() as f64
}

#[test]
#[ignore = "trains 200 steps with each recipe, a minute or more; `.ci/run` runs it among its slow tests"]
fn every_recipe_learns_as_bf16_does() {
    let bf16 = losses(None);
    let expected = at_the_end(&bf16);
    // Something was learned: text is far from uniform bytes, and from the frequencies of single bytes.
    assert!(bf16[0] > 5.0 && expected < 3.0, "{} to {expected}", bf16[0]);
    let delayed = Options { delayed: Some(16), ..Options::default() };
    for options in Recipe::ALL.map(Options::of).into_iter().chain([delayed]) {
        let found = at_the_end(&losses(Some(options.clone())));
        eprintln!("{}, delayed {:?}: {found:.4}, bf16 {expected:.4}", options.recipe, options.delayed);
        assert!((found / expected - 1.0).abs() < 0.01, "{options:?}: {found} for {expected}");
    }
}
