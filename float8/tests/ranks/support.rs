//! A model on one rank and on the ranks of a mesh, and a step of it.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrotitan_float8::comm::{DeviceMesh, ReduceOp, threads};
use ferrotitan_float8::nn::llama::{LlamaConfig, build};
use ferrotitan_float8::nn::mesh::{Degrees, Mesh, Region, View};
use ferrotitan_float8::nn::{Batch, Error, Materialize, Model, Transform};
use ferrotitan_float8::tch::{Device, Kind, Tensor};
use ferrotitan_float8::{Float8, Handle, Options};
use ferrotitan_fsdp::Fsdp;
use ferrotitan_tp::{Plan, TensorParallel};

pub(crate) const ROWS: usize = 4;

pub(crate) fn config() -> LlamaConfig {
    LlamaConfig {
        dim: 64,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 4,
        hidden_dim: 128,
        ..LlamaConfig::flavor("debugmodel", 64).unwrap()
    }
}

/// These rows of the global batch, 16 tokens each.
pub(crate) fn batch(rows: std::ops::Range<usize>) -> Batch {
    let index = Tensor::arange(ROWS as i64 * 16, (Kind::Int64, Device::Cpu)).view([ROWS as i64, 16]);
    let own = index.narrow(0, rows.start as i64, rows.len() as i64);
    Batch::new((&own * 13 + 2).remainder(61), Some((&own * 7 + 1).remainder(61))).unwrap()
}

/// One rank's model, its handles, and the rows of the batch that it reads.
pub(crate) struct Rank {
    pub(crate) model: Model,
    pub(crate) float8: Handle,
    pub(crate) fsdp: ferrotitan_fsdp::Handle,
    pub(crate) rows: std::ops::Range<usize>,
}

pub(crate) fn rank(mesh: &DeviceMesh, options: &Options, kind: Kind, compute: Option<Kind>) -> Result<Rank, Error> {
    rank_with(mesh, options, ferrotitan_tp::Options::default(), kind, compute, |_| ())
}

/// The same, by a way of tensor parallelism, and with something else done to the model between Float8 and sharding.
pub(crate) fn rank_with(
    mesh: &DeviceMesh,
    options: &Options,
    tensor_parallel: ferrotitan_tp::Options,
    kind: Kind,
    compute: Option<Kind>,
    change: impl FnOnce(&mut Model),
) -> Result<Rank, Error> {
    let mut model = build(&config())?;
    TensorParallel::new(mesh.clone(), tensor_parallel, Plan::llama(&config())).apply(&mut model, mesh)?;
    let float8 = Float8::new(options.clone()).with_mesh(mesh).attach(&mut model)?;
    change(&mut model);
    let fsdp = Fsdp::new(mesh, ferrotitan_fsdp::Options::default()).with_wires(float8.wires()).attach(&mut model)?;
    model.materialize(&Materialize { seed: 2, kind, compute, device: Device::Cpu }, mesh)?;
    let count = ROWS / mesh.size(View::LOSS);
    let start = mesh.index(View::LOSS) * count;
    Ok(Rank { model, float8, fsdp, rows: start..start + count })
}

pub(crate) fn on<T: Send>(degrees: Degrees, body: impl Fn(DeviceMesh) -> Result<T, Error> + Sync) -> Vec<T> {
    run(degrees, body).unwrap()
}

pub(crate) fn run<T: Send>(
    degrees: Degrees,
    body: impl Fn(DeviceMesh) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, ferrotitan_float8::comm::Error> {
    let timeout = Duration::from_secs(30);
    threads::run(degrees, &threads::Options { timeout, intra_op_threads: Some(1), ..threads::Options::default() }, body)
}

/// A rank's loss, and by name its parameters' regions and gradients.
pub(crate) type Outcome = (f64, BTreeMap<String, (Region, Tensor)>);

pub(crate) fn step(rank: &mut Rank, mesh: &DeviceMesh) -> Result<Outcome, Error> {
    rank.model.parameters().iter().for_each(|parameter| parameter.clear_gradient().unwrap());
    let loss = rank.model.forward(&batch(rank.rows.clone()))? / 64.0;
    loss.backward();
    rank.fsdp.finish_backward()?;
    rank.float8.finish_gradients()?;
    let loss = mesh.group(View::LOSS).unwrap().all_reduce_scalar(loss.double_value(&[]), ReduceOp::Sum);
    let gradient = |parameter: &ferrotitan_float8::nn::Parameter| {
        let gradient = parameter.gradient().unwrap().unwrap().copy();
        (parameter.name().to_owned(), (parameter.layout().local_region(mesh), gradient))
    };
    Ok((loss.unwrap(), rank.model.parameters().iter().map(gradient).collect()))
}

pub(crate) fn part(whole: &Tensor, region: &Region) -> Tensor {
    region.ranges().enumerate().fold(whole.shallow_clone(), |part, (axis, range)| {
        part.narrow(axis as i64, range.start as i64, range.len() as i64)
    })
}

pub(crate) fn degrees(dp_shard: usize, tp: usize) -> Degrees {
    Degrees { dp_shard, tp, ..Degrees::default() }
}
