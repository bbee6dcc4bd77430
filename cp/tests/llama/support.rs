//! A small Llama, a batch for it, and the comparison of what ranks make of both with what one rank does.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use ferrotitan_comm::threads::Options;
use ferrotitan_comm::{DeviceMesh, Group, ReduceOp};
use ferrotitan_mesh::{Mesh, View};
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{ActivationCheckpoint, Batch, Documents, IGNORE_INDEX, Materialize, Model, NamedLayer, Parameter};
use tch::{Device, Kind, Tensor};

const SEQ: i64 = 23;
const VOCABULARY: i64 = 37;

pub(crate) const HOW: Materialize = Materialize { seed: 5, kind: Kind::Double, compute: None, device: Device::Cpu };

pub(crate) fn limits() -> Options {
    Options { timeout: Duration::from_secs(60), ..Options::default() }
}

pub(crate) fn config() -> LlamaConfig {
    LlamaConfig {
        dim: 32,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        hidden_dim: 43,
        ..LlamaConfig::flavor("debugmodel", VOCABULARY as usize).unwrap()
    }
}

pub(crate) fn checkpoint_blocks(model: &mut Model) {
    let layers = std::mem::take(model.layers_mut()).into_iter().map(|NamedLayer { name, layer }| {
        let layer = if name.starts_with("layers.") { Box::new(ActivationCheckpoint::new(layer)) } else { layer };
        NamedLayer { name, layer }
    });
    *model.layers_mut() = layers.collect();
}

/// Two sequences, some tokens of which have no label.
pub(crate) fn batch(documents: Option<Documents>) -> Batch {
    let options = (Kind::Int64, Device::Cpu);
    let tokens = (Tensor::arange(2 * SEQ, options) * 7).remainder(VOCABULARY).reshape([2, SEQ]);
    let ignored = Tensor::arange(SEQ, options).remainder(5).eq(2);
    let labels = (&tokens * 3 + 1).remainder(VOCABULARY).masked_fill(&ignored, IGNORE_INDEX);
    Batch { documents, ..Batch::new(tokens, Some(labels)).unwrap() }
}

/// Documents of two sequences: several, some of one token, and one.
pub(crate) fn packed() -> Option<Documents> {
    Some(Documents::from_lengths(vec![vec![1, 13, 1, 1, 7], vec![23]]).unwrap())
}

/// What one rank alone makes of a batch.
pub(crate) struct Expected {
    pub(crate) loss: f64,
    /// By parameter. `Tensor` is not `Sync`.
    gradients: Mutex<BTreeMap<String, Tensor>>,
}

pub(crate) fn alone(batch: &Batch) -> Expected {
    let mut model = build(&config()).unwrap();
    model.materialize(&HOW, &DeviceMesh::single(Device::Cpu)).unwrap();
    let loss = model.forward(batch).unwrap();
    loss.backward();
    let gradient = |p: &Parameter| (p.name().to_owned(), p.gradient().unwrap().unwrap());
    let gradients = model.parameters().iter().map(gradient).collect();
    Expected { loss: loss.double_value(&[]), gradients: Mutex::new(gradients) }
}

impl Expected {
    /// Compares this rank's shards' gradients, summed over `over` where they are still parts of the sum, and the loss.
    pub(crate) fn assert_met(&self, loss: &Tensor, model: &Model, mesh: &DeviceMesh, over: Option<&Group>, what: &str) {
        let total = mesh.group(View::LOSS).unwrap().all_reduce_scalar(loss.double_value(&[]), ReduceOp::Sum).unwrap();
        assert!((total - self.loss).abs() <= 1e-11 * self.loss.abs(), "{what}: loss {total}, not {}", self.loss);
        for parameter in model.parameters() {
            let own = parameter.gradient().unwrap().unwrap();
            let own = over.map_or(own.shallow_clone(), |group| group.all_reduce(&own, ReduceOp::Sum).unwrap());
            let whole = self.gradients.lock().unwrap()[parameter.name()].copy();
            let scale = whole.abs().max().double_value(&[]);
            let region = parameter.layout().local_region(mesh);
            let axes = region.offset.iter().zip(&region.shape).enumerate();
            let part = axes
                .fold(whole, |part, (axis, (&start, &length))| part.narrow(axis as i64, start as i64, length as i64));
            assert_eq!(own.size(), part.size(), "{what}: {}", parameter.name());
            if own.numel() > 0 {
                let off = (own - part).abs().max().double_value(&[]) / scale;
                assert!(off <= 1e-10, "{what}: the gradient of {} is off by {off:e}", parameter.name());
            }
        }
    }
}

/// The sequences that a data-parallel rank reads.
pub(crate) fn rows(batch: &Batch, mesh: &DeviceMesh) -> Batch {
    let (index, count) = (mesh.index(View::BATCH), mesh.size(View::BATCH));
    let length = batch.tokens.size()[0] as usize / count;
    let cut = |x: &Tensor| x.narrow(0, (index * length) as i64, length as i64);
    let documents = batch
        .documents
        .as_ref()
        .map(|documents| Documents::from_lengths(documents.lengths()[index * length..][..length].to_vec()).unwrap());
    Batch { documents, ..Batch::new(cut(&batch.tokens), batch.labels.as_ref().map(cut)).unwrap() }
}
