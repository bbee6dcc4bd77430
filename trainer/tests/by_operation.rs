//! Activation checkpointing by operation beneath other features: the same numbers to the bit, and what has been summed
//! or exchanged is not sent again.
#![allow(clippy::unwrap_used)]
#![cfg(all(feature = "cp", feature = "float8", feature = "fsdp", feature = "tp"))]

use std::time::Duration;

use ferrotitan_comm::{BoxError, DeviceMesh, Op, threads};
use ferrotitan_cp::{ContextOptions, ContextParallel, Method};
use ferrotitan_float8::{Float8, Recipe};
use ferrotitan_fsdp::Fsdp;
use ferrotitan_mesh::Degrees;
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{ActivationCheckpoint, Batch, Layer, Materialize, Transform as _};
use ferrotitan_tp::{Options, Plan, TensorParallel};
use tch::{Device, Kind, Tensor};

type Wrap = fn(Box<dyn Layer>) -> Box<dyn Layer>;

const NONE: Wrap = |layer| layer;
const FULL: Wrap = |layer| Box::new(ActivationCheckpoint::new(layer));
const BY_OPERATION: Wrap = |layer| Box::new(ActivationCheckpoint::by_operation(layer));

struct Case {
    degrees: Degrees,
    kind: Kind,
    float8: Option<Recipe>,
    tp: Options,
    cp: Method,
}

/// Of a rank: its loss and gradients, and how many sums it sent among `tp` and exchanges among `cp`.
fn rank_main(mesh: &DeviceMesh, case: &Case, wrap: Wrap) -> Result<(Vec<Tensor>, u64), BoxError> {
    let flavor = LlamaConfig::flavor("debugmodel", 64)?;
    let config = LlamaConfig { dim: 64, n_layers: 2, n_heads: 4, n_kv_heads: 2, hidden_dim: 96, ..flavor };
    let mut model = build(&config)?;
    TensorParallel::new(mesh.clone(), case.tp, Plan::llama(&config)).apply(&mut model, mesh)?;
    if let Some(recipe) = case.float8 {
        let options = ferrotitan_float8::Options { emulate: true, ..ferrotitan_float8::Options::of(recipe) };
        Float8::new(options).with_mesh(mesh).attach(&mut model)?;
    }
    let context = ContextParallel::new(mesh, ContextOptions { method: case.cp, ..ContextOptions::default() })?;
    context.apply(&mut model, mesh)?;
    for named in model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers.")) {
        named.wrap(wrap);
    }
    let sharded = Fsdp::new(mesh, ferrotitan_fsdp::Options::default()).attach(&mut model)?;
    model.materialize(&Materialize { seed: 1, kind: case.kind, compute: None, device: Device::Cpu }, mesh)?;

    let tokens = (Tensor::arange(64, (Kind::Int64, Device::Cpu)) * 13).remainder(64).view([2, 32]);
    let batch = Batch::new(tokens.shallow_clone(), Some((tokens + 1).remainder(64)))?;
    let loss = model.forward(&context.shard_batch(&batch)?)?;
    loss.backward();
    sharded.finish_backward()?;
    let mut results = vec![loss.detach()];
    for parameter in model.parameters() {
        results.push(parameter.gradient()?.ok_or("every parameter takes part")?);
    }
    let sent = [("tp", Op::ReduceScatter), ("tp", Op::AllReduce), ("cp", Op::Send), ("cp", Op::AllToAll)];
    Ok((results, sent.iter().map(|(group, op)| mesh.recorder().total(group, *op).count).sum()))
}

fn run(case: &Case, wrap: Wrap) -> (Vec<Vec<Tensor>>, u64) {
    let limits = threads::Options { timeout: Duration::from_secs(60), ..threads::Options::default() };
    let ranks = threads::run(case.degrees, &limits, |mesh| rank_main(&mesh, case, wrap)).unwrap();
    let sent = ranks[0].1;
    (ranks.into_iter().map(|rank| rank.0).collect(), sent)
}

#[test]
fn no_number_changes_and_nothing_is_sent_twice() {
    let degrees = |dp_shard, cp, tp| Degrees { dp_shard, cp, tp, ..Degrees::default() };
    let sequence = Options::default();
    let whole = Options { sequence_parallel: false, ..sequence };
    let plain = |degrees, tp, cp| Case { degrees, kind: Kind::Double, float8: None, tp, cp };
    let float8 =
        |recipe| Case { kind: Kind::Float, float8: Some(recipe), ..plain(degrees(1, 1, 2), sequence, Method::Ring) };
    let cases = [
        plain(degrees(1, 1, 2), sequence, Method::Ring),
        plain(degrees(2, 1, 2), whole, Method::Ring),
        plain(degrees(1, 1, 2), Options { async_tp: true, ..sequence }, Method::Ring),
        Case { kind: Kind::Float, ..plain(degrees(2, 2, 1), sequence, Method::Ring) },
        plain(degrees(1, 2, 1), sequence, Method::AllToAll),
        float8(Recipe::Rowwise),
        float8(Recipe::Tensorwise),
    ];
    for case in &cases {
        let name = format!("{:?}, {:?}, {:?}, {:?}, {:?}", case.degrees, case.kind, case.float8, case.tp, case.cp);
        let (expected, sent) = run(case, NONE);
        let (ours, ours_sent) = run(case, BY_OPERATION);
        assert!(ours == expected, "{name}");
        // Float8 agrees on scales besides.
        if case.float8.is_none() {
            assert_eq!(ours_sent, sent, "{name}");
            assert!(run(case, FULL).1 > sent, "{name}");
        }
    }
}
