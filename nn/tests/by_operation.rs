//! Activation checkpointing by operation: the same numbers, half the products computed again.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrotitan_ext::autograd;
use ferrotitan_mesh::Grid;
use ferrotitan_mesh::rng::Distribution;
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{
    ActivationCheckpoint, Batch, Documents, Error, Gemm, Layer, Materialize, Model, Native, Operation, Parameter,
    Projection, Result, Seam, kept,
};
use tch::{Device, Kind, Tensor};

type Wrap = fn(Box<dyn Layer>) -> Box<dyn Layer>;

const NONE: Wrap = |layer| layer;
const FULL: Wrap = |layer| Box::new(ActivationCheckpoint::new(layer));
const BY_OPERATION: Wrap = |layer| Box::new(ActivationCheckpoint::by_operation(layer));
const BLOCKS: usize = 2;
const PRODUCTS: usize = 7;

/// Counts outputs, which by operation are computed once and half of them twice.
#[derive(Debug, Default)]
struct Counting(AtomicUsize);

impl Gemm for Counting {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Native.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Native.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
        Native.weight_gradient(dy, x, weight)
    }
}

fn model(kind: Kind, wrap: Wrap, gemm: Option<&Arc<Counting>>) -> Model {
    let config = LlamaConfig {
        dim: 64,
        n_layers: BLOCKS,
        n_heads: 4,
        n_kv_heads: 2,
        hidden_dim: 96,
        ..LlamaConfig::flavor("debugmodel", 50).unwrap()
    };
    let mut model = build(&config).unwrap();
    for named in model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers.")) {
        for (_, seam) in named.layer.seams() {
            let (Some(gemm), Seam::Linear(linear)) = (gemm, seam) else { continue };
            linear.projections_mut().iter_mut().for_each(|projection| projection.gemm = gemm.clone());
        }
        named.wrap(wrap);
    }
    model.materialize(&Materialize { seed: 3, kind, compute: None, device: Device::Cpu }, &Grid::single()).unwrap();
    model
}

fn batch(documents: bool) -> Batch {
    let tokens = (Tensor::arange(40, (Kind::Int64, Device::Cpu)) * 13).remainder(50).view([2, 20]);
    let mut batch = Batch::new(tokens.shallow_clone(), Some((tokens + 1).remainder(50))).unwrap();
    batch.documents = documents.then(|| Documents::from_lengths(vec![vec![7, 1, 12], vec![20]]).unwrap());
    batch
}

/// The loss and every gradient after two steps' backward passes.
fn results(model: &mut Model, documents: bool) -> Vec<Tensor> {
    let mut results: Vec<Tensor> = (0..2)
        .map(|_| {
            let loss = model.forward(&batch(documents)).unwrap();
            autograd::backward(&[loss.shallow_clone()], &[], false).unwrap();
            loss.detach()
        })
        .collect();
    results.extend(model.parameters().iter().map(|parameter| parameter.gradient().unwrap().unwrap()));
    results
}

#[test]
fn the_numbers_are_the_same_to_the_bit() {
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
        for documents in [false, true] {
            let expected = results(&mut model(kind, NONE, None), documents);
            assert!(expected[2..].iter().all(|gradient| gradient.abs().max().double_value(&[]) > 0.0));
            for wrap in [FULL, BY_OPERATION] {
                assert_eq!(
                    results(&mut model(kind, wrap, None), documents),
                    expected,
                    "{kind:?}, documents {documents}"
                );
            }
            let gemm = Arc::new(Counting::default());
            assert_eq!(results(&mut model(kind, BY_OPERATION, Some(&gemm)), documents), expected);
        }
    }
}

#[test]
fn every_second_product_is_computed_again() {
    let computed = |wrap| {
        let gemm = Arc::new(Counting::default());
        let mut model = model(Kind::Float, wrap, Some(&gemm));
        let loss = model.forward(&batch(false)).unwrap();
        assert_eq!(gemm.0.swap(0, Ordering::Relaxed), BLOCKS * PRODUCTS);
        loss.backward();
        gemm.0.load(Ordering::Relaxed)
    };
    assert_eq!(computed(NONE), 0);
    assert_eq!(computed(BY_OPERATION), BLOCKS * (PRODUCTS / 2));
    assert_eq!(computed(FULL), BLOCKS * PRODUCTS);
}

#[test]
fn a_retained_graph_computes_what_was_given_away() {
    let gemm = Arc::new(Counting::default());
    let mut twice = model(Kind::Double, BY_OPERATION, Some(&gemm));
    let loss = twice.forward(&batch(false)).unwrap();
    autograd::backward(&[loss.shallow_clone()], &[], true).unwrap();
    gemm.0.store(0, Ordering::Relaxed);
    autograd::backward(&[loss], &[], false).unwrap();
    assert_eq!(gemm.0.load(Ordering::Relaxed), BLOCKS * PRODUCTS);
    let expected = results(&mut model(Kind::Double, NONE, None), false);
    for (ours, theirs) in twice.parameters().iter().zip(&expected[2..]) {
        assert_eq!(ours.gradient().unwrap().unwrap(), *theirs);
    }
}

#[test]
fn inside_each_other_they_do_not_disturb() {
    let expected = results(&mut model(Kind::Double, NONE, None), true);
    let nestings: [Wrap; 3] = [
        |layer| BY_OPERATION(BY_OPERATION(layer)),
        |layer| BY_OPERATION(FULL(layer)),
        |layer| FULL(BY_OPERATION(layer)),
    ];
    for nesting in nestings {
        assert_eq!(results(&mut model(Kind::Double, nesting, None), true), expected);
    }
}

#[test]
fn without_gradients_nothing_is_kept() {
    let mut model = model(Kind::Double, BY_OPERATION, None);
    let quiet = tch::no_grad(|| model.forward(&batch(false)).unwrap());
    assert_eq!(quiet, model.forward(&batch(false)).unwrap().detach());
}

/// Runs other operations with every call.
#[derive(Debug)]
struct Fickle {
    projection: Projection,
    calls: usize,
    plan: [&'static [Operation]; 2],
}

impl Layer for Fickle {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> Result<Tensor> {
        let plan = self.plan[self.calls.min(1)];
        self.calls += 1;
        let mut x = x.shallow_clone();
        for &operation in plan {
            x = match operation {
                Operation::Product => self.projection.forward(&x)?,
                other => kept(other, || Ok::<_, Error>(vec![&x * 1.0]))?.remove(0),
            };
        }
        Ok(x)
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.projection.weight.clone()]
    }
}

#[test]
fn a_layer_that_changes_its_mind_is_refused() {
    use Operation::{Attention, Product};
    let refused = |plan| {
        let projection = Projection::new("p", 4, 4, Distribution::Normal { mean: 0.0, std: 0.5 });
        projection.weight.materialize(0, Kind::Double, Device::Cpu, &Grid::single()).unwrap();
        let mut layer = ActivationCheckpoint::by_operation(Box::new(Fickle { projection, calls: 0, plan }));
        let x = Tensor::ones([2, 4], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let out = layer.forward(&x, &batch(false)).unwrap();
        let error = autograd::backward(&[out.sum(Kind::Double)], &[], false).map_err(|error| error.to_string());
        // What went wrong in one layer does not reach the next.
        let mut model = model(Kind::Double, BY_OPERATION, None);
        model.forward(&batch(false)).unwrap().backward();
        error
    };
    assert_eq!(refused([&[Product, Product], &[Product, Product]]), Ok(()));
    let other = refused([&[Product, Product], &[Product, Attention]]).unwrap_err();
    assert!(other.contains("a matrix product in the forward pass where it has attention"), "{other}");
    let more = refused([&[Product], &[Product, Product]]).unwrap_err();
    assert!(more.contains("nothing more in the forward pass where it has a matrix product"), "{more}");
    let fewer = refused([&[Product, Attention], &[Product]]).unwrap_err();
    assert!(fewer.contains("attention in the forward pass where it has nothing more"), "{fewer}");
}
