//! Other features inside tensor parallelism: other products, deferred weight gradients, reduced precision, logits.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::support::{HOW, Outcome, assert_parity, batch, config, divided, largest_difference, on_ranks, single, step};
use ferrotitan_ext::autograd;
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::mesh::Grid;
use ferrotitan_nn::{Batch, Gemm, Materialize, Model, Native, Result, Seam};
use ferrotitan_tp::Options;
use tch::{Kind, Tensor};

fn replace_gemms(model: &mut Model, gemm: impl Fn(&str) -> Arc<dyn Gemm>) {
    for (name, seam) in model.seams() {
        let Seam::Linear(linear) = seam else { continue };
        // The head's loss asks for its weight gradient in the forward pass already.
        if name != "output" {
            for projection in linear.projections_mut() {
                projection.gemm = gemm(projection.weight.name());
            }
        }
    }
}

/// Counts the products of one weight.
#[derive(Debug)]
struct Counting {
    name: String,
    counts: Arc<Mutex<BTreeMap<String, [usize; 3]>>>,
}

impl Counting {
    fn count(&self, which: usize) {
        self.counts.lock().unwrap().entry(self.name.clone()).or_default()[which] += 1;
    }
}

impl Gemm for Counting {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.count(0);
        Native.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.count(1);
        Native.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
        self.count(2);
        Native.weight_gradient(dy, x, weight)
    }
}

#[test]
fn every_product_passes_its_gemm() {
    let config = config(8, 4, 24, 32);
    for sequence_parallel in [true, false] {
        on_ranks(2, |mesh| {
            let options = Options { sequence_parallel, ..Options::default() };
            let mut model = divided(&config, &mesh, options).unwrap();
            let counts = Arc::new(Mutex::new(BTreeMap::new()));
            replace_gemms(&mut model, |name| Arc::new(Counting { name: name.into(), counts: counts.clone() }));
            model.materialize(&HOW, &mesh).unwrap();
            step(&mut model, &batch(2, 8, 32), &mesh);
            let counts = counts.lock().unwrap();
            assert_eq!(counts.len(), 2 * 7, "{counts:?}");
            assert!(counts.values().all(|count| *count == [1, 1, 1]), "{counts:?}");
        });
    }
}

/// Puts weight gradients off, as a pipeline does.
#[derive(Debug, Default)]
struct Deferring(Mutex<Vec<[Tensor; 3]>>);

impl Deferring {
    /// Computes what was put off. Each gradient goes through the graph between the parameter and the product, since a
    /// sum over ranks may stand there.
    fn catch_up(&self) {
        for [dy, x, weight] in self.0.lock().unwrap().drain(..) {
            let gradient = Native.weight_gradient(&dy, &x, &weight).unwrap();
            autograd::backward(&[weight], &[gradient], true).unwrap();
        }
    }
}

impl Gemm for Deferring {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Native.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Native.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
        self.0.lock().unwrap().push([dy.shallow_clone(), x.detach(), weight.shallow_clone()]);
        Ok(None)
    }
}

#[test]
fn weight_gradients_may_come_later() {
    // Key-value heads on two ranks each: their gradients are summed over ranks, later.
    let config = config(8, 2, 24, 32);
    let expected = single(&config, &batch(2, 8, 32));
    let ranks = on_ranks(4, |mesh| {
        let mut model = divided(&config, &mesh, Options::default()).unwrap();
        let deferring = Arc::new(Deferring::default());
        replace_gemms(&mut model, |_| deferring.clone());
        model.materialize(&HOW, &mesh).unwrap();
        let loss = model.forward(&batch(2, 8, 32)).unwrap();
        (&loss * 0.125).backward();
        let waiting = model.parameters().iter().filter(|p| p.gradient().unwrap().is_none()).count();
        assert_eq!(waiting, 2 * 7, "every projection of the blocks waits for its gradient");
        deferring.catch_up();
        let gradients = model.parameters().into_iter().map(|parameter| {
            let gradient = parameter.gradient().unwrap().unwrap();
            (parameter.name().to_owned(), parameter.layout().local_region(&mesh), gradient)
        });
        Outcome { loss: loss.double_value(&[]), gradients: gradients.collect() }
    });
    assert_parity(&expected, &ranks);
}

#[test]
fn logits_without_labels_are_whole_on_every_rank() {
    let config = config(8, 4, 24, 33);
    let prompt = || Batch { labels: None, ..batch(2, 7, 33) };
    let mut model = build(&config).unwrap();
    model.materialize(&HOW, &Grid::single()).unwrap();
    let expected = model.forward(&prompt()).unwrap();
    assert_eq!(expected.size(), [2, 7, 33]);
    for sequence_parallel in [true, false] {
        let options = Options { sequence_parallel, ..Options::default() };
        let ranks = on_ranks(4, |mesh| {
            let mut model = divided(&config, &mesh, options).unwrap();
            model.materialize(&HOW, &mesh).unwrap();
            tch::no_grad(|| model.forward(&prompt()).unwrap())
        });
        for logits in ranks {
            assert!((logits - &expected).abs().max().double_value(&[]) < 1e-12);
        }
    }
}

/// In bf16 the ranks' sums are taken in another order than one rank's. So the two differ, but neither is further from
/// the values in fp32 than the other's own rounding explains; and gradients that are summed over ranks are summed in the
/// parameters' own dtype.
#[test]
fn reduced_precision_stays_within_rounding() {
    let config = config(8, 2, 24, 32);
    let run = |model: &mut Model, compute: Option<Kind>, mesh: &dyn ferrotitan_nn::mesh::Mesh| {
        model.materialize(&Materialize { kind: Kind::Float, compute, ..HOW }, mesh).unwrap();
        step(model, &batch(2, 8, 32), mesh)
    };
    let exact = run(&mut build(&config).unwrap(), None, &Grid::single());
    let alone = run(&mut build(&config).unwrap(), Some(Kind::BFloat16), &Grid::single());
    let (rounding, _) = largest_difference(&exact, &[alone]);
    let ranks = on_ranks(4, |mesh| {
        let mark = mesh.recorder().mark();
        let mut model = divided(&config, &mesh, Options::default()).unwrap();
        let outcome = run(&mut model, Some(Kind::BFloat16), &mesh);
        let sums = mesh.recorder().since(mark);
        let sums = sums.iter().filter(|event| event.op == ferrotitan_comm::Op::AllReduce);
        assert!(sums.clone().count() > 8 && sums.clone().all(|event| event.kind == Kind::Float));
        outcome
    });
    assert!(ranks[0].gradients.iter().all(|(_, _, gradient)| gradient.kind() == Kind::Float));
    let (difference, what) = largest_difference(&exact, &ranks);
    assert!(difference > 0.0 && difference < 2.0 * rounding, "{what} is off by {difference}, one rank by {rounding}");
}

#[test]
fn frozen_parameters_need_no_gather() {
    let config = LlamaConfig { n_layers: 1, ..config(8, 4, 24, 32) };
    let events = on_ranks(2, |mesh| {
        let mut model = divided(&config, &mesh, Options::default()).unwrap();
        for parameter in model.parameters().iter().filter(|p| p.name().starts_with("layers.0.")) {
            parameter.set_trainable(false);
        }
        model.materialize(&HOW, &mesh).unwrap();
        let loss = model.forward(&batch(2, 8, 32)).unwrap();
        let mark = mesh.recorder().mark();
        loss.backward();
        let frozen = model.parameters().iter().filter(|p| p.gradient().unwrap().is_none()).count();
        assert_eq!(frozen, 9);
        let gathers = mesh.recorder().since(mark);
        gathers.iter().filter(|event| event.op == ferrotitan_comm::Op::AllGather).count()
    });
    // Two upstream gradients, and the embedding's.
    assert_eq!(events[0], 3);
}
