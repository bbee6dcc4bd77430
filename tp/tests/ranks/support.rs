//! A model on one rank and divided among several, and the comparison of the two.

use std::collections::HashMap;
use std::time::Duration;

use ferrotitan_comm::{DeviceMesh, threads};
use ferrotitan_mesh::{Degrees, Grid, Region};
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{ActivationCheckpoint, Batch, IGNORE_INDEX, Layer, Materialize, Model, RmsNorm, Transform};
use ferrotitan_tp::{Options, Plan, TensorParallel};
use tch::{Device, Kind, Tensor};

pub(crate) const HOW: Materialize = Materialize { seed: 5, kind: Kind::Double, compute: None, device: Device::Cpu };

/// One rank of a run: the loss, and for each parameter its name, the region that the rank holds, and its gradient.
pub(crate) struct Outcome {
    pub(crate) loss: f64,
    pub(crate) gradients: Vec<(String, Region, Tensor)>,
}

pub(crate) fn config(n_heads: usize, n_kv_heads: usize, hidden_dim: usize, vocab_size: usize) -> LlamaConfig {
    LlamaConfig {
        dim: 4 * n_heads,
        n_layers: 2,
        n_heads,
        n_kv_heads,
        hidden_dim,
        ..LlamaConfig::flavor("debugmodel", vocab_size).unwrap()
    }
}

/// Some tokens, and labels of which a few have no loss.
pub(crate) fn batch(rows: i64, sequence: i64, vocabulary: i64) -> Batch {
    let index = Tensor::arange(rows * sequence, (Kind::Int64, Device::Cpu));
    let tokens = (&index * &index * 3 + &index * 7 + 5).remainder(vocabulary).view([rows, sequence]);
    let labels = (&index * 7 + 2).remainder(vocabulary).masked_fill(&(&index + 2).remainder(5).eq(0), IGNORE_INDEX);
    Batch::new(tokens, Some(labels.view([rows, sequence]))).unwrap()
}

pub(crate) fn checkpoint_blocks(model: &mut Model) {
    for named in model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers.")) {
        let inner = std::mem::replace(&mut named.layer, Box::new(RmsNorm::new("unused", 1, 1.0)) as Box<dyn Layer>);
        named.layer = Box::new(ActivationCheckpoint::new(inner));
    }
}

pub(crate) fn divided(
    config: &LlamaConfig,
    mesh: &DeviceMesh,
    options: Options,
) -> Result<Model, ferrotitan_nn::Error> {
    let mut model = build(config)?;
    TensorParallel::new(mesh.clone(), options, Plan::llama(config)).apply(&mut model, mesh)?;
    Ok(model)
}

/// A forward and a backward pass of a model that has storage.
pub(crate) fn step(model: &mut Model, batch: &Batch, mesh: &dyn ferrotitan_mesh::Mesh) -> Outcome {
    let loss = model.forward(batch).unwrap();
    (&loss * 0.125).backward();
    let gradients = model.parameters().into_iter().map(|parameter| {
        let gradient = parameter.gradient().unwrap();
        let gradient = gradient.unwrap_or_else(|| panic!("{} has no gradient", parameter.name()));
        (parameter.name().to_owned(), parameter.layout().local_region(mesh), gradient.copy())
    });
    Outcome { loss: loss.double_value(&[]), gradients: gradients.collect() }
}

pub(crate) fn single(config: &LlamaConfig, batch: &Batch) -> Outcome {
    let mut model = build(config).unwrap();
    model.materialize(&HOW, &Grid::single()).unwrap();
    step(&mut model, batch, &Grid::single())
}

pub(crate) fn limits() -> threads::Options {
    threads::Options { timeout: Duration::from_secs(30), ..threads::Options::default() }
}

/// Runs on `tp` rank threads; what a rank returns is its value.
pub(crate) fn on_ranks<T: Send>(tp: usize, body: impl Fn(DeviceMesh) -> T + Sync) -> Vec<T> {
    let degrees = Degrees { tp, ..Degrees::default() };
    threads::run(degrees, &limits(), |mesh| Ok::<_, ferrotitan_nn::Error>(body(mesh))).unwrap()
}

pub(crate) fn parallel(
    config: &LlamaConfig,
    tp: usize,
    options: Options,
    checkpoint: bool,
    batch: impl Fn() -> Batch + Sync,
) -> Vec<Outcome> {
    on_ranks(tp, |mesh| {
        let mut model = divided(config, &mesh, options).unwrap();
        if checkpoint {
            checkpoint_blocks(&mut model);
        }
        model.materialize(&HOW, &mesh).unwrap();
        step(&mut model, &batch(), &mesh)
    })
}

/// The largest difference of loss and gradients between every rank and the single one, relative to the largest element.
pub(crate) fn largest_difference(expected: &Outcome, ranks: &[Outcome]) -> (f64, String) {
    // A gradient whose terms cancel is rounding alone: it is held to the scale of the others, with four digits less.
    let largest = |gradient: &Tensor| gradient.abs().max().double_value(&[]);
    let floor = expected.gradients.iter().map(|(_, _, gradient)| largest(gradient)).fold(0.0, f64::max) * 1e-4;
    let whole: HashMap<&str, &Tensor> =
        expected.gradients.iter().map(|(name, _, gradient)| (name.as_str(), gradient)).collect();
    let mut worst = (0.0, String::from("nothing"));
    let mut note = |difference: f64, what: String| {
        if difference.is_nan() || difference > worst.0 {
            worst = (difference, what);
        }
    };
    for (rank, outcome) in ranks.iter().enumerate() {
        note((outcome.loss - expected.loss).abs() / expected.loss.abs().max(1e-300), format!("loss of rank {rank}"));
        assert_eq!(outcome.gradients.len(), whole.len());
        for (name, region, gradient) in &outcome.gradients {
            let mut part = whole[name.as_str()].shallow_clone();
            let scale = largest(&part).max(floor);
            for (axis, range) in region.ranges().enumerate() {
                part = part.narrow(axis as i64, range.start as i64, range.len() as i64);
            }
            assert_eq!(part.size(), gradient.size(), "{name} on rank {rank}");
            if part.numel() > 0 {
                note(largest(&(part - gradient)) / scale, format!("{name} on rank {rank}"));
            }
        }
    }
    worst
}

pub(crate) fn assert_parity(expected: &Outcome, ranks: &[Outcome]) {
    let (difference, what) = largest_difference(expected, ranks);
    assert!(difference < 1e-10, "{what} differs by {difference:e}");
}
