//! The Llama's loss and gradients over ranks that share its sequences, against one rank's.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::Duration;

use ferrotitan_comm::threads::{Options, run};
use ferrotitan_comm::{DeviceMesh, ReduceOp};
use ferrotitan_cp::{Balance, ContextOptions, ContextParallel, Method};
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{ActivationCheckpoint, Batch, Documents, IGNORE_INDEX, Materialize, Model, NamedLayer, Transform};
use tch::{Device, Kind, Tensor};

const SEQ: i64 = 23;
const VOCABULARY: i64 = 37;

fn model(mesh: &DeviceMesh, transform: Option<&ContextParallel>, checkpoint: bool) -> Model {
    let config = LlamaConfig {
        dim: 32,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        hidden_dim: 48,
        ..LlamaConfig::flavor("debugmodel", VOCABULARY as usize).unwrap()
    };
    let mut model = build(&config).unwrap();
    if let Some(transform) = transform {
        transform.apply(&mut model, mesh).unwrap();
    }
    if checkpoint {
        let layers = std::mem::take(model.layers_mut());
        let wrapped = layers.into_iter().map(|NamedLayer { name, layer }| {
            let layer = if name.starts_with("layers.") { Box::new(ActivationCheckpoint::new(layer)) } else { layer };
            NamedLayer { name, layer }
        });
        *model.layers_mut() = wrapped.collect();
    }
    model.materialize(&Materialize { seed: 5, kind: Kind::Double, compute: None, device: Device::Cpu }, mesh).unwrap();
    model
}

fn batch(documents: Option<Documents>) -> Batch {
    let options = (Kind::Int64, Device::Cpu);
    let tokens = Tensor::arange(2 * SEQ, options).multiply_scalar(7).remainder(VOCABULARY).reshape([2, SEQ]);
    let labels = (&tokens * 3 + 1).remainder(VOCABULARY);
    let ignored = Tensor::arange(SEQ, options).remainder(5).eq(2);
    let labels = labels.masked_fill(&ignored, IGNORE_INDEX);
    Batch { documents, ..Batch::new(tokens, Some(labels)).unwrap() }
}

/// The loss and every parameter's gradient.
fn pass(model: &mut Model, batch: &Batch) -> (f64, BTreeMap<String, Tensor>) {
    let loss = model.forward(batch).unwrap();
    loss.backward();
    let gradient = |p: &ferrotitan_nn::Parameter| (p.name().to_owned(), p.gradient().unwrap().unwrap());
    (loss.double_value(&[]), model.parameters().iter().map(gradient).collect())
}

fn parity(ranks: usize, method: Method, balance: Balance, documents: Option<Documents>, checkpoint: bool) {
    let single = DeviceMesh::single(Device::Cpu);
    let (loss, gradients) = pass(&mut model(&single, None, false), &batch(documents.clone()));
    let gradients = std::sync::Mutex::new(gradients);
    let options = Options { timeout: Duration::from_secs(30), ..Options::default() };
    run(Degrees { cp: ranks, ..Degrees::default() }, &options, |mesh| -> ferrotitan_cp::Result<()> {
        let context = ContextParallel::new(&mesh, ContextOptions { method, balance })?;
        let local = context.shard_batch(&batch(documents.clone()))?;
        let (own_loss, own) = pass(&mut model(&mesh, Some(&context), checkpoint), &local);
        let group = mesh.group(View::LOSS)?;
        let total = group.all_reduce_scalar(own_loss, ReduceOp::Sum)?;
        assert!((total - loss).abs() <= 1e-12 * loss.abs(), "{method} over {ranks}: loss {total}, not {loss}");
        for (name, own) in own {
            let sum = group.all_reduce(&own, ReduceOp::Sum)?;
            let expected = gradients.lock().unwrap()[&name].copy();
            let scale = expected.abs().max().double_value(&[]);
            let off = (sum - expected).abs().max().double_value(&[]) / scale;
            assert!(off <= 1e-10, "{method} over {ranks}: the gradient of {name} is off by {off:e}");
        }
        Ok(())
    })
    .unwrap();
}

fn packed() -> Option<Documents> {
    Some(Documents::from_lengths(vec![vec![1, 13, 1, 1, 7], vec![23]]).unwrap())
}

#[test]
fn one_document_a_sequence() {
    for ranks in [1, 2, 4, 8] {
        for method in Method::ALL {
            parity(ranks, method, Balance::HeadTail, None, false);
        }
    }
}

#[test]
fn packed_documents() {
    for (ranks, balance) in [(2, Balance::HeadTail), (3, Balance::Contiguous), (8, Balance::Documents)] {
        for method in Method::ALL {
            parity(ranks, method, balance, packed(), false);
        }
    }
}

#[test]
fn more_ranks_than_tokens() {
    for method in Method::ALL {
        let documents = None;
        let cut = |documents: &Option<Documents>| {
            let whole = batch(documents.clone());
            let cut = |x: &Tensor| x.narrow(1, 0, 3);
            Batch { labels: whole.labels.as_ref().map(cut), ..Batch::new(cut(&whole.tokens), None).unwrap() }
        };
        let single = DeviceMesh::single(Device::Cpu);
        let (loss, _) = pass(&mut model(&single, None, false), &cut(&documents));
        run(Degrees { cp: 5, ..Degrees::default() }, &Options::default(), |mesh| -> ferrotitan_cp::Result<()> {
            let context = ContextParallel::new(&mesh, ContextOptions { method, balance: Balance::HeadTail })?;
            let local = context.shard_batch(&cut(&documents))?;
            let (own, _) = pass(&mut model(&mesh, Some(&context), false), &local);
            let total = mesh.group(View::LOSS)?.all_reduce_scalar(own, ReduceOp::Sum)?;
            assert!((total - loss).abs() <= 1e-12 * loss.abs(), "{total} {loss}");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn recomputed_layers() {
    for method in Method::ALL {
        parity(2, method, Balance::HeadTail, packed(), true);
    }
}

#[test]
fn logits_come_back_in_order() {
    let whole = Batch { labels: None, ..batch(packed()) };
    let single = DeviceMesh::single(Device::Cpu);
    let expected = std::sync::Mutex::new(model(&single, None, false).forward(&whole).unwrap().detach());
    run(Degrees { cp: 4, ..Degrees::default() }, &Options::default(), |mesh| -> ferrotitan_cp::Result<()> {
        let options = ContextOptions { method: Method::AllGather, balance: Balance::Documents };
        let context = ContextParallel::new(&mesh, options)?;
        let local = context.shard_batch(&Batch { labels: None, ..batch(packed()) })?;
        let logits = model(&mesh, Some(&context), false).forward(&local).unwrap();
        let gathered = context.gather(&logits, 1, &local)?;
        let expected = expected.lock().unwrap();
        assert_eq!(gathered.size(), expected.size());
        assert!((gathered - &*expected).abs().max().double_value(&[]) < 1e-11);
        Ok(())
    })
    .unwrap();
}
