//! A transform of one's own: low-rank adapters (LoRA: Hu et al. 2021, <https://arxiv.org/abs/2106.09685>) on every
//! attention projection of a frozen model, together with tensor parallelism and fully sharded data parallelism.
//!
//! A forward pass reads `W + B A` in the place of a frozen `W`. That is a parameter's reader, so neither the model nor
//! the other transforms know of it: `tp` has divided `W` before, and `B` is divided as its rows are, `A` as its
//! columns.
//!
//! `cargo run -p ferrotitan-trainer --example custom_transform`
#![allow(clippy::print_stdout)]

use std::sync::Arc;

use ferrotitan_comm::{BoxError, DeviceMesh, ReduceOp, threads};
use ferrotitan_ext::autograd;
use ferrotitan_fsdp::Fsdp;
use ferrotitan_mesh::rng::Distribution;
use ferrotitan_mesh::{Degrees, Layout, Mesh, View};
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{Batch, Error, Layer, Materialize, Model, Parameter, Result, Seam, Transform};
use ferrotitan_optim::{AdamW, AdamWOptions};
use ferrotitan_tp::{Options, Plan, TensorParallel};
use tch::{Device, Kind, Tensor};

const SEQUENCES: usize = 8;
const LENGTH: usize = 24;
const VOCABULARY: usize = 48;

/// Freezes a model and gives each attention projection an adapter.
#[derive(Debug)]
struct LowRank {
    mesh: DeviceMesh,
    rank: usize,
}

impl LowRank {
    /// `A` and `B` of one projection, read together with its weight.
    fn adapt(&self, weight: &Parameter) -> Result<[Parameter; 2]> {
        let layout = weight.layout();
        let [outputs, inputs] = layout.shape() else {
            return Err(Error::Config(format!("{} is no projection", weight.name())));
        };
        let name = |part: &str| format!("{}.{part}", weight.name().trim_end_matches(".weight"));
        let start = Distribution::Normal { mean: 0.0, std: 1.0 / (*inputs as f64).sqrt() };
        let a = Parameter::new(name("lora_a"), &[self.rank, *inputs], start);
        let b = Parameter::new(name("lora_b"), &[*outputs, self.rank], Distribution::Constant(0.0));
        // A divided axis of the weight is an axis of one of the two, which is divided alike. The other is whole on
        // every rank, each of which uses it for a part of the features: its gradient is the sum over them.
        for (adapter, axis) in [(&a, 1), (&b, 0)] {
            let splits: Vec<_> = layout.splits().iter().filter(|split| split.axis == axis).cloned().collect();
            if splits.is_empty() {
                let group = self.mesh.group(View::TP).map_err(carried)?;
                adapter.set_reader(Some(Arc::new(move |whole| group.copy_autograd(&whole).map_err(carried))));
            }
            let shape = adapter.layout().shape().to_vec();
            let divided = Layout::new(&shape, splits, View::NONE, layout.stages());
            adapter.set_layout(divided.map_err(|source| Error::Layout { name: adapter.name().into(), source })?);
        }
        let (down, up) = (a.clone(), b.clone());
        weight.set_reader(Some(Arc::new(move |weight| Ok(weight + up.value()?.matmul(&down.value()?)))));
        Ok([a, b])
    }
}

fn carried(source: ferrotitan_comm::Error) -> Error {
    Error::Other { context: "low-rank adapters".into(), source: source.into() }
}

impl Transform for LowRank {
    fn apply(&self, model: &mut Model, _mesh: &dyn Mesh) -> Result<()> {
        for parameter in model.parameters() {
            parameter.set_trainable(false);
        }
        for named in model.layers_mut() {
            let mut adapters = Vec::new();
            for (name, seam) in named.layer.seams() {
                let Seam::Linear(linear) = seam else { continue };
                if !name.contains("attention") {
                    continue;
                }
                for projection in linear.projections() {
                    adapters.extend(self.adapt(&projection.weight)?);
                }
            }
            if !adapters.is_empty() {
                named.wrap(|inner| Box::new(Adapted { inner, adapters }));
            }
        }
        Ok(())
    }
}

/// A layer that owns adapters besides: whoever shards, saves or trains parameters finds them here.
#[derive(Debug)]
struct Adapted {
    inner: Box<dyn Layer>,
    adapters: Vec<Parameter>,
}

impl Layer for Adapted {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        self.inner.forward(x, batch)
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.inner.parameters().into_iter().chain(self.adapters.iter().cloned()).collect()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        self.inner.seams()
    }
}

/// Sequences number `range`: each repeats three tokens of its own, which a model can only know by looking back.
fn sequences(range: std::ops::Range<usize>) -> Result<Batch> {
    let token = |number: usize, place: usize| ((number * 31 + place % 3 * (number % 7 + 5)) % VOCABULARY) as i64;
    let tokens: Vec<i64> =
        range.clone().flat_map(|number| (0..=LENGTH).map(move |place| token(number, place))).collect();
    let tokens = Tensor::from_slice(&tokens).view([range.len() as i64, LENGTH as i64 + 1]);
    Batch::new(tokens.narrow(1, 0, LENGTH as i64), Some(tokens.narrow(1, 1, LENGTH as i64).contiguous()))
}

/// The loss of each step, and how many numbers are trained of how many.
fn rank_main(mesh: &DeviceMesh, steps: usize) -> Result<(Vec<f64>, [usize; 2]), BoxError> {
    let flavor = LlamaConfig::flavor("debugmodel", VOCABULARY)?;
    let config = LlamaConfig { dim: 64, n_layers: 2, n_heads: 4, n_kv_heads: 2, hidden_dim: 96, ..flavor };
    let mut model = build(&config)?;
    TensorParallel::new(mesh.clone(), Options::default(), Plan::llama(&config)).apply(&mut model, mesh)?;
    LowRank { mesh: mesh.clone(), rank: 4 }.apply(&mut model, mesh)?;
    let sharded = Fsdp::new(mesh, ferrotitan_fsdp::Options::default()).attach(&mut model)?;
    // A real run would now read the frozen weights from a checkpoint.
    model.materialize(&Materialize { seed: 7, kind: Kind::Double, compute: None, device: Device::Cpu }, mesh)?;

    let numbers = |parameter: &Parameter| parameter.layout().shape().iter().product::<usize>();
    let parameters = model.parameters();
    let trained = parameters.iter().filter(|parameter| parameter.is_trainable()).map(numbers).sum();
    let all = parameters.iter().map(numbers).sum();
    // It trains what is trainable.
    let mut adamw = AdamW::new(parameters, AdamWOptions { lr: 1e-2, ..AdamWOptions::default() }, &[])?;
    let readers = mesh.group(View::BATCH)?;
    let own = SEQUENCES / readers.size();
    let mut losses = Vec::new();
    for step in 0..steps {
        let first = step * SEQUENCES + readers.rank() * own;
        // A sum, divided once by the tokens of all ranks.
        let loss = model.forward(&sequences(first..first + own)?)? / (SEQUENCES * LENGTH) as f64;
        autograd::backward(&[loss.shallow_clone()], &[], false)?;
        sharded.finish_backward()?;
        adamw.step(1.0)?;
        adamw.clear_gradients()?;
        losses.push(readers.all_reduce_scalar(loss.double_value(&[]), ReduceOp::Sum)?);
    }
    Ok((losses, [trained, all]))
}

/// The losses, and how many numbers are trained of how many.
pub(crate) fn train(degrees: Degrees, steps: usize) -> Result<(Vec<f64>, [usize; 2]), BoxError> {
    let ranks = threads::run(degrees, &threads::Options::default(), |mesh| rank_main(&mesh, steps))?;
    Ok(ranks.into_iter().next().ok_or("a mesh has a rank")?)
}

fn main() -> Result<(), BoxError> {
    let steps = 80;
    let (alone, [trained, all]) = train(Degrees::default(), steps)?;
    let (divided, _) = train(Degrees { dp_shard: 2, tp: 2, ..Degrees::default() }, steps)?;
    println!("{trained} of {all} numbers are trained");
    println!("mean loss of ten steps to   one rank   four ranks");
    for (index, (alone, divided)) in alone.chunks(10).zip(divided.chunks(10)).enumerate() {
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        println!("{:>25}   {:>8.4}   {:>10.4}", 10 * (index + 1), mean(alone), mean(divided));
    }
    Ok(())
}
