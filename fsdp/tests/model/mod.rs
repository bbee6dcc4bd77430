//! A small Llama, trained for a few steps on one rank and on many, for comparison.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use ferrotitan_fsdp::comm::{DeviceMesh, ReduceOp, threads};
use ferrotitan_fsdp::nn::llama::{LlamaConfig, build};
use ferrotitan_fsdp::nn::mesh::{Degrees, Grid, Mesh, Region, View};
use ferrotitan_fsdp::nn::{ActivationCheckpoint, Batch, Materialize, Model, Parameter, RmsNorm};
use ferrotitan_fsdp::tch::{self, Device, Kind, Tensor};
use ferrotitan_fsdp::{Fsdp, Handle, Options};
use ferrotitan_optim::{NormKind, gradient_norm};

/// What is done with the model.
#[derive(Clone, Debug)]
pub struct Training {
    pub layers: usize,
    pub tied: bool,
    pub vocabulary: usize,
    pub hidden: usize,
    pub checkpoint: bool,
    pub steps: usize,
    pub rows: usize,
    pub accumulation: usize,
    /// Whether every microbatch reduces, or the last alone.
    pub reduces_each: bool,
    pub how: Materialize,
}

impl Default for Training {
    fn default() -> Self {
        let how = Materialize { seed: 3, kind: Kind::Double, compute: None, device: Device::Cpu };
        Self {
            layers: 2,
            tied: false,
            vocabulary: 37,
            hidden: 27,
            checkpoint: false,
            steps: 2,
            rows: 8,
            accumulation: 1,
            reduces_each: true,
            how,
        }
    }
}

/// What came of it on all ranks together.
#[derive(Debug)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    /// Of the last step, by name.
    pub gradients: BTreeMap<String, Tensor>,
    /// After the last step, by name.
    pub weights: BTreeMap<String, Tensor>,
}

/// What came of it on one rank: its parts, and where they belong.
pub struct Share {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub parts: Vec<Part>,
}

/// What one rank has of one parameter.
pub struct Part {
    pub name: String,
    pub shape: Vec<usize>,
    pub region: Region,
    pub gradient: Option<Tensor>,
    pub weight: Tensor,
}

pub fn model(training: &Training) -> Model {
    let config = LlamaConfig {
        dim: 20,
        n_layers: training.layers,
        n_heads: 2,
        n_kv_heads: 1,
        hidden_dim: training.hidden,
        tied_embeddings: training.tied,
        ..LlamaConfig::flavor("debugmodel", training.vocabulary).unwrap()
    };
    let mut model = build(&config).unwrap();
    if training.checkpoint {
        for named in model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers.")) {
            let inner = std::mem::replace(&mut named.layer, Box::new(RmsNorm::new("unused", 1, 1.0)));
            named.layer = Box::new(ActivationCheckpoint::new(inner));
        }
    }
    model
}

pub fn even(length: usize, index: usize, count: usize) -> Range<usize> {
    let cut = |index: usize| length / count * index + (length % count).min(index);
    cut(index)..cut(index + 1)
}

/// Rows of the global batch of a step, some tokens of which have no label.
pub fn batch(training: &Training, step: usize, rows: Range<usize>) -> Batch {
    const SEQ: i64 = 5;
    let vocabulary = training.vocabulary as i64;
    let all = Tensor::arange(training.rows as i64 * SEQ, (Kind::Int64, Device::Cpu)).view([training.rows as i64, SEQ]);
    let tokens = (&all * 13 + step as i64).remainder(vocabulary);
    let labels = (&all * 7 + 1).remainder(vocabulary).masked_fill(&all.remainder(4).eq(step as i64 % 4), -100);
    let cut = |tensor: Tensor| tensor.narrow(0, rows.start as i64, rows.len() as i64);
    Batch::new(cut(tokens), Some(cut(labels))).unwrap()
}

/// The labels of a step that count.
fn valid(training: &Training, step: usize) -> f64 {
    let labels = batch(training, step, 0..training.rows).labels.unwrap();
    labels.ne(-100).sum(Kind::Double).double_value(&[])
}

/// Plain gradient descent, on whatever this rank has.
fn descend(parameters: &[Parameter]) {
    for parameter in parameters {
        if let Some(gradient) = parameter.gradient().unwrap() {
            let _ = tch::no_grad(|| parameter.local().unwrap().detach().subtract_(&(gradient * 0.5)));
        }
    }
}

/// Trains on this rank's rows of every global batch.
pub fn train(training: &Training, mesh: &DeviceMesh, model: &mut Model, handle: Option<&Handle>) -> Share {
    let parameters = model.parameters();
    let mine = even(training.rows, mesh.index(View::LOSS), mesh.size(View::LOSS));
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..training.steps {
        parameters.iter().for_each(|parameter| parameter.clear_gradient().unwrap());
        let valid = valid(training, step);
        let mut loss = 0.0;
        for micro in 0..training.accumulation {
            let rows = even(mine.len(), micro, training.accumulation);
            let rows = mine.start + rows.start..mine.start + rows.end;
            if let Some(handle) = handle {
                handle.set_requires_reduction(training.reduces_each || micro + 1 == training.accumulation);
            }
            let part = model.forward(&batch(training, step, rows)).unwrap() / valid;
            part.backward();
            loss += part.double_value(&[]);
            if let Some(handle) = handle {
                handle.finish_backward().unwrap();
            }
        }
        losses.push(mesh.group(View::LOSS).unwrap().all_reduce_scalar(loss, ReduceOp::Sum).unwrap());
        norms.push(gradient_norm(&parameters, NormKind::Two, mesh).unwrap());
        descend(&parameters);
    }
    let part = |parameter: &Parameter| {
        let layout = parameter.layout();
        let gradient = parameter.gradient().unwrap().map(|gradient| gradient.copy());
        let weight = parameter.local().unwrap().detach().copy();
        let (name, shape) = (parameter.name().to_owned(), layout.shape().to_vec());
        Part { name, shape, region: layout.local_region(mesh), gradient, weight }
    };
    Share { losses, norms, parts: parameters.iter().map(part).collect() }
}

/// On one rank, without any of this crate.
pub fn alone(training: &Training) -> Outcome {
    let mut model = model(training);
    model.materialize(&training.how, &Grid::single()).unwrap();
    let training = Training { accumulation: 1, ..training.clone() };
    merge(vec![train(&training, &DeviceMesh::single(Device::Cpu), &mut model, None)])
}

pub fn rank_options() -> threads::Options {
    threads::Options { timeout: Duration::from_secs(30), intra_op_threads: Some(1), ..threads::Options::default() }
}

/// On every rank of a mesh; `make` makes the transform of one rank.
pub fn sharded(training: &Training, degrees: Degrees, make: impl Fn(&DeviceMesh) -> Fsdp + Sync) -> Outcome {
    let shares = threads::run(degrees, &rank_options(), |mesh| {
        let mut model = model(training);
        let handle = make(&mesh).attach(&mut model)?;
        model.materialize(&training.how, &mesh).unwrap();
        Ok::<_, ferrotitan_fsdp::Error>(train(training, &mesh, &mut model, Some(&handle)))
    });
    merge(shares.unwrap())
}

pub fn with_options(options: &Options) -> impl Fn(&DeviceMesh) -> Fsdp + Sync {
    let options = options.clone();
    move |mesh| Fsdp::new(mesh, options.clone())
}

/// Puts the ranks' parts together; replicas must be equal to the bit.
pub fn merge(shares: Vec<Share>) -> Outcome {
    let (mut gradients, mut weights) = (BTreeMap::new(), BTreeMap::new());
    for Part { name, shape, region, gradient, weight } in shares.iter().flat_map(|share| &share.parts) {
        place(&mut weights, name, shape, region, weight);
        if let Some(gradient) = gradient {
            place(&mut gradients, name, shape, region, gradient);
        }
    }
    for share in &shares {
        assert_eq!((&share.losses, &share.norms), (&shares[0].losses, &shares[0].norms));
    }
    let first = shares.into_iter().next().unwrap();
    Outcome { losses: first.losses, norms: first.norms, gradients, weights }
}

fn place(into: &mut BTreeMap<String, Tensor>, name: &str, shape: &[usize], region: &Region, part: &Tensor) {
    let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
    let nothing = || Tensor::full(sizes.as_slice(), f64::NAN, (Kind::Double, Device::Cpu));
    let whole = into.entry(name.to_owned()).or_insert_with(nothing);
    let mut target = whole.shallow_clone();
    for (axis, range) in region.ranges().enumerate() {
        target = target.narrow(axis as i64, range.start as i64, range.len() as i64);
    }
    let part = part.to_kind(Kind::Double);
    let same = target.isnan().logical_or(&target.eq_tensor(&part)).all();
    assert!(same.int64_value(&[]) == 1, "{name}: two ranks differ on {region:?}");
    target.copy_(&part);
}

pub fn assert_close(ours: &Outcome, theirs: &Outcome, tolerance: f64) {
    let near = |a: f64, b: f64| (a - b).abs() <= tolerance * b.abs().max(1e-30);
    for (name, a, b) in [("loss", &ours.losses, &theirs.losses), ("norm", &ours.norms, &theirs.norms)] {
        assert!(a.iter().zip(b).all(|(a, b)| near(*a, *b)), "{name}: {a:?} against {b:?}");
    }
    for (a, b) in [(&ours.gradients, &theirs.gradients), (&ours.weights, &theirs.weights)] {
        assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
        for ((name, a), b) in a.iter().zip(b.values()) {
            let (difference, scale) = ((a - b).abs().max().double_value(&[]), b.abs().max().double_value(&[]));
            assert!(difference <= tolerance * scale, "{name}: off by {difference} of {scale}");
        }
    }
}
