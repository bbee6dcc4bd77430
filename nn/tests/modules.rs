//! Each module against a dense computation in double precision.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrotitan_mesh::rng::Distribution;
use ferrotitan_mesh::{Degrees, Grid, Layout, Parts, View};
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{
    ActivationCheckpoint, Attention, Batch, ChunkedCrossEntropy, Documents, Error, Gemm, Head, IGNORE_INDEX, Layer,
    Loss, Materialize, Model, Native, Parameter, Plain, Projection, Result, RmsNorm, Rope, RopeScaling, Sdpa, Seam,
    differentiable,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);
const HOW: Materialize = Materialize { seed: 3, kind: Kind::Double, compute: None, device: Device::Cpu };

fn normal(seed: u64, shape: &[usize]) -> Tensor {
    let parameter = Parameter::new("x", shape, Distribution::Normal { mean: 0.0, std: 1.0 });
    parameter.materialize(seed, Kind::Double, Device::Cpu, &Grid::single()).unwrap();
    parameter.local().unwrap().detach()
}

fn leaf(seed: u64, shape: &[usize]) -> Tensor {
    normal(seed, shape).set_requires_grad(true)
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 { 0.0 } else { (a - b).abs().max().double_value(&[]) }
}

/// Counts products and remembers the largest output.
#[derive(Debug, Default)]
struct Counting {
    outputs: AtomicUsize,
    largest: AtomicUsize,
    weight_gradients: AtomicUsize,
}

impl Gemm for Counting {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let y = Native.output(x, weight)?;
        self.outputs.fetch_add(1, Ordering::Relaxed);
        self.largest.fetch_max(y.numel(), Ordering::Relaxed);
        Ok(y)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Native.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
        self.weight_gradients.fetch_add(1, Ordering::Relaxed);
        Native.weight_gradient(dy, x, weight)
    }
}

fn head(vocabulary: usize, dim: usize, gemm: Arc<dyn Gemm>) -> Plain {
    let mut projection = Projection::new("output", dim, vocabulary, Distribution::Normal { mean: 0.0, std: 0.5 });
    projection.weight.materialize(1, Kind::Double, Device::Cpu, &Grid::single()).unwrap();
    projection.gemm = gemm;
    Plain::new(vec![projection])
}

fn weight(head: &Plain) -> Tensor {
    use ferrotitan_nn::Linear as _;
    head.projections()[0].weight.local().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn chunked_cross_entropy_is_cross_entropy(
        batch in 1_usize..3, seq in 1_usize..9, vocabulary in 2_usize..30, held in 1_usize..200, ignored in 0_usize..4, seed: u64,
    ) {
        let dim = 6;
        let head = head(vocabulary, dim, Arc::new(Native));
        let hidden = leaf(seed, &[batch, seq, dim]);
        let count = (batch * seq) as i64;
        let labels = (Tensor::arange(count, (Kind::Int64, Device::Cpu)) * 7).remainder(vocabulary as i64);
        let _ = labels.narrow(0, 0, (ignored as i64).min(count)).fill_(IGNORE_INDEX);
        let labels = labels.view([batch as i64, seq as i64]);

        let ours = ChunkedCrossEntropy { logits: held }.forward(&hidden, &head, &labels).unwrap();
        (&ours * 0.25).backward();
        let (hidden_gradient, weight_gradient) = (hidden.grad().copy(), weight(&head).grad().copy());

        let (h, w) = (hidden.detach().set_requires_grad(true), weight(&head).detach().set_requires_grad(true));
        let log_p = h.matmul(&w.tr()).log_softmax(-1, Kind::Double);
        let mask = labels.ne(IGNORE_INDEX).to_kind(Kind::Double);
        let picked = log_p.gather(-1, &labels.clamp_min(0).unsqueeze(-1), false).squeeze_dim(-1);
        let dense = -(picked * mask).sum(Kind::Double);
        (&dense * 0.25).backward();
        prop_assert!(largest_difference(&ours, &dense) < 1e-11);
        prop_assert!(largest_difference(&hidden_gradient, &h.grad()) < 1e-11);
        prop_assert!(largest_difference(&weight_gradient, &w.grad()) < 1e-11);
    }

    #[test]
    fn attention_stays_within_documents(
        lengths in prop::collection::vec(1_i64..9, 1..5), groups in 1_usize..3, share in 1_usize..4, seed: u64,
    ) {
        let (seq, k) = (lengths.iter().sum::<i64>(), 4);
        let heads = groups * share;
        // The second sequence is cut elsewhere.
        let documents = Documents::from_lengths(vec![lengths.clone(), lengths.iter().rev().copied().collect()]).unwrap();
        let (q, kk, v) = (
            leaf(seed, &[2, seq as usize, heads, k]),
            leaf(seed ^ 1, &[2, seq as usize, groups, k]),
            leaf(seed ^ 2, &[2, seq as usize, groups, k]),
        );
        let mut batch = Batch::new(Tensor::zeros([2, seq], (Kind::Int64, Device::Cpu)), None).unwrap();
        batch.documents = Some(documents.clone());
        let ours = Sdpa.forward(&q, &kk, &v, &batch).unwrap();
        let upstream = normal(seed ^ 3, &[2, seq as usize, heads, k]);
        (&ours * &upstream).sum(Kind::Double).backward();
        let gradients = [q.grad().copy(), kk.grad().copy(), v.grad().copy()];

        let ids: Vec<i64> = documents.lengths().iter()
            .flat_map(|l| l.iter().enumerate().flat_map(|(id, &n)| std::iter::repeat_n(id as i64, n as usize))).collect();
        let ids = Tensor::from_slice(&ids).view([2, seq]);
        let allowed = ids.unsqueeze(-1).eq_tensor(&ids.unsqueeze(1))
            .logical_and(&Tensor::ones([seq, seq], F64).tril(0).to_kind(Kind::Bool)).unsqueeze(1);
        let (q2, k2, v2) = (
            q.detach().set_requires_grad(true), kk.detach().set_requires_grad(true), v.detach().set_requires_grad(true),
        );
        let repeat = |x: &Tensor| x.transpose(1, 2).repeat_interleave_self_int(share as i64, 1, None);
        let scores = q2.transpose(1, 2).matmul(&repeat(&k2).transpose(-1, -2)) / (k as f64).sqrt();
        let p = scores.masked_fill(&allowed.logical_not(), f64::NEG_INFINITY).softmax(-1, Kind::Double);
        let dense = p.matmul(&repeat(&v2)).transpose(1, 2);
        (&dense * &upstream).sum(Kind::Double).backward();
        prop_assert!(largest_difference(&ours, &dense) < 1e-11);
        for (ours, dense) in gradients.iter().zip([q2.grad(), k2.grad(), v2.grad()]) {
            prop_assert!(largest_difference(ours, &dense) < 1e-11);
        }
    }

    #[test]
    fn rotations_depend_on_distance_alone(seed: u64, shift in 0_i64..50_000) {
        let rope = Rope::new(8, 500_000.0, Some(RopeScaling::default())).unwrap();
        let (q, k) = (normal(seed, &[1, 2, 1, 8]), normal(seed ^ 1, &[1, 2, 1, 8]));
        let score = |first: i64| {
            let positions = Tensor::from_slice(&[first, first + 5]).unsqueeze(0);
            let rotations = rope.rotations(&positions, Kind::Double).unwrap();
            let (q, k) = (Rope::rotate(&q, &rotations).unwrap(), Rope::rotate(&k, &rotations).unwrap());
            (q.select(1, 1) * k.select(1, 0)).sum(Kind::Double).double_value(&[])
        };
        prop_assert!((score(0) - score(shift)).abs() < 1e-9);
    }

    #[test]
    fn products_of_the_seam_are_the_native_ones(rows in 0_usize..5, inputs in 0_usize..7, outputs in 0_usize..7, seed: u64) {
        let (x, w) = (leaf(seed, &[2, rows, inputs]), leaf(seed ^ 1, &[outputs, inputs]));
        let upstream = normal(seed ^ 2, &[2, rows, outputs]);
        let mut results = Vec::new();
        for y in [differentiable(Arc::new(Native), &x, &w).unwrap(), x.linear(&w, None::<&Tensor>)] {
            let (mut gx, mut gw) = (x.grad(), w.grad());
            if gx.defined() {
                let _ = gx.zero_();
                let _ = gw.zero_();
            }
            (&y * &upstream).sum(Kind::Double).backward();
            results.push([y.detach(), x.grad().copy(), w.grad().copy()]);
        }
        for (ours, native) in results[0].iter().zip(&results[1]) {
            prop_assert!(largest_difference(ours, native) < 1e-12);
        }
    }

    #[test]
    fn every_layout_holds_parts_of_one_tensor(
        rows in 1_usize..40, columns in 1_usize..5, dp_shard in 1_usize..5, tp in 1_usize..4, seed: u64,
    ) {
        let init = Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: -1.5, high: 1.5 };
        let make = |layout: Layout, grid: &Grid| {
            let parameter = Parameter::new("w", &[rows, columns], init);
            parameter.set_layout(layout);
            parameter.materialize(seed, Kind::Float, Device::Cpu, grid).unwrap();
            parameter.local().unwrap().detach()
        };
        let full = make(Layout::replicated(&[rows, columns]), &Grid::single());
        let layout = Layout::replicated(&[rows, columns])
            .shard(View::TP, 1, Parts::Even).unwrap()
            .shard(View::FSDP, 0, Parts::Even).unwrap();
        let degrees = Degrees { dp_shard, tp, ..Degrees::default() };
        for rank in 0..dp_shard * tp {
            let grid = Grid::new(degrees, rank).unwrap();
            let region = layout.local_region(&grid);
            let mut expected = full.shallow_clone();
            for (axis, (&offset, &length)) in region.offset.iter().zip(&region.shape).enumerate() {
                expected = expected.narrow(axis as i64, offset as i64, length as i64);
            }
            prop_assert_eq!(make(layout.clone(), &grid), expected);
        }
    }
}

#[test]
fn large_parameters_are_drawn_in_slabs() {
    // More elements than one slab and than one thread's share of it, in rows of an odd length.
    let draw = |shape: &[usize]| {
        let parameter = Parameter::new("w", shape, Distribution::Normal { mean: 0.0, std: 1.0 });
        parameter.materialize(5, Kind::Float, Device::Cpu, &Grid::single()).unwrap();
        parameter.local().unwrap().detach().view([-1])
    };
    let (rows, columns) = (1501, 1403);
    assert_eq!(draw(&[rows, columns]), draw(&[rows * columns]));
    assert_eq!(draw(&[]).size(), [1]);
    assert_eq!(draw(&[0, 3]).size(), [0]);
}

#[test]
fn logits_are_never_held_whole() {
    let counting = Arc::new(Counting::default());
    let head = head(50, 4, counting.clone());
    let hidden = leaf(0, &[2, 16, 4]);
    let labels = Tensor::ones([2, 16], (Kind::Int64, Device::Cpu));
    ChunkedCrossEntropy { logits: 250 }.forward(&hidden, &head, &labels).unwrap().backward();
    assert_eq!(counting.largest.load(Ordering::Relaxed), 250);
    // Seven chunks of at most five tokens, each computed once.
    assert_eq!(counting.outputs.load(Ordering::Relaxed), 7);
    assert_eq!(counting.weight_gradients.load(Ordering::Relaxed), 7);
}

#[test]
fn a_frozen_head_takes_chunks_too() {
    let head = head(50, 4, Arc::new(Native));
    let frozen = weight(&head).set_requires_grad(false);
    let hidden = leaf(0, &[2, 16, 4]);
    let labels = Tensor::ones([2, 16], (Kind::Int64, Device::Cpu));
    let mut gradients = Vec::new();
    for logits in [250, 1 << 20] {
        ChunkedCrossEntropy { logits }.forward(&hidden, &head, &labels).unwrap().backward();
        gradients.push(hidden.grad().copy());
        let _ = hidden.grad().zero_();
    }
    assert!(largest_difference(&gradients[0], &gradients[1]) < 1e-12 && !frozen.grad().defined());
}

#[test]
fn a_head_that_defers_its_weight_gradient_takes_no_chunks() {
    #[derive(Debug)]
    struct Deferring;
    impl Gemm for Deferring {
        fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
            Native.output(x, weight)
        }

        fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
            Native.input_gradient(dy, weight)
        }

        fn weight_gradient(&self, _dy: &Tensor, _x: &Tensor, _weight: &Tensor) -> Result<Option<Tensor>> {
            Ok(None)
        }
    }
    let head = head(50, 4, Arc::new(Deferring));
    let labels = Tensor::ones([2, 16], (Kind::Int64, Device::Cpu));
    let loss = |logits| ChunkedCrossEntropy { logits }.forward(&leaf(0, &[2, 16, 4]), &head, &labels);
    assert!(loss(250).unwrap_err().to_string().contains("do not defer it there"));
    loss(1 << 20).unwrap().backward();
}

#[test]
fn norm_is_its_formula() {
    let norm = RmsNorm::new("norm", 8, 1e-5);
    norm.weight().materialize(0, Kind::Double, Device::Cpu, &Grid::single()).unwrap();
    let x = normal(1, &[3, 8]);
    let dense = &x / (x.square().mean_dim(-1, true, Kind::Double) + 1e-5).sqrt();
    assert!(largest_difference(&norm.normalize(&x).unwrap(), &dense) < 1e-12);
}

fn debug(vocabulary: usize) -> LlamaConfig {
    LlamaConfig {
        dim: 64,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        hidden_dim: 96,
        ..LlamaConfig::flavor("debugmodel", vocabulary).unwrap()
    }
}

fn batch(vocabulary: i64) -> Batch {
    let tokens = (Tensor::arange(40, (Kind::Int64, Device::Cpu)) * 13).remainder(vocabulary).view([2, 20]);
    let labels = (&tokens + 1).remainder(vocabulary);
    Batch::new(tokens, Some(labels)).unwrap()
}

fn gradients(model: &Model) -> Vec<Tensor> {
    model.parameters().iter().map(|p| p.gradient().unwrap().unwrap().copy()).collect()
}

#[test]
fn checkpointed_layers_give_the_same_gradients_bit_for_bit() {
    let mut plain = build(&debug(50)).unwrap();
    plain.materialize(&HOW, &Grid::single()).unwrap();
    plain.forward(&batch(50)).unwrap().backward();

    let mut checkpointed = build(&debug(50)).unwrap();
    let counting = Arc::new(Counting::default());
    for (name, seam) in checkpointed.seams() {
        if let (true, Seam::Linear(linear)) = (name == "layers.1.attention.wo", seam) {
            linear.projections_mut()[0].gemm = counting.clone();
        }
    }
    for named in checkpointed.layers_mut() {
        if named.name.starts_with("layers.") {
            named.wrap(|inner| Box::new(ActivationCheckpoint::new(inner)));
        }
    }
    checkpointed.materialize(&HOW, &Grid::single()).unwrap();
    checkpointed.forward(&batch(50)).unwrap().backward();
    assert_eq!(counting.outputs.load(Ordering::Relaxed), 2, "forward and recomputation");
    for (ours, theirs) in gradients(&checkpointed).iter().zip(gradients(&plain)) {
        assert_eq!(*ours, theirs);
    }
}

#[test]
fn first_loss_is_near_that_of_guessing() {
    let mut model = build(&debug(200)).unwrap();
    model.materialize(&HOW, &Grid::single()).unwrap();
    let loss = model.forward(&batch(200)).unwrap().double_value(&[]) / 40.0;
    assert!((loss - 200_f64.ln()).abs() < 1.0, "{loss}");
}

#[test]
fn compute_dtype_is_a_cast_whose_gradient_comes_back() {
    let mut model = build(&debug(50)).unwrap();
    let how = Materialize { kind: Kind::Float, compute: Some(Kind::BFloat16), ..HOW };
    model.materialize(&how, &Grid::single()).unwrap();
    let loss = model.forward(&batch(50)).unwrap();
    assert_eq!(loss.kind(), Kind::Float);
    loss.backward();
    assert!(gradients(&model).iter().all(|g| g.kind() == Kind::Float && g.abs().max().double_value(&[]) > 0.0));
}

#[test]
fn a_tied_table_is_one_parameter() {
    let model = build(&LlamaConfig { tied_embeddings: true, ..debug(50) }).unwrap();
    let names: Vec<_> = model.parameters().iter().map(|p| p.name().to_owned()).collect();
    assert!(names.contains(&"tok_embeddings.weight".into()) && !names.contains(&"output.weight".into()), "{names:?}");
    let elements: usize = model.parameters().iter().map(|p| p.layout().shape().iter().product::<usize>()).sum();
    assert_eq!(elements, LlamaConfig { tied_embeddings: true, ..debug(50) }.parameters());
}

#[test]
fn frozen_parameters_have_no_gradient() {
    let mut model = build(&debug(50)).unwrap();
    model.parameters()[0].set_trainable(false);
    model.materialize(&HOW, &Grid::single()).unwrap();
    model.forward(&batch(50)).unwrap().backward();
    let with: Vec<bool> = model.parameters().iter().map(|p| p.gradient().unwrap().is_some()).collect();
    assert!(!with[0] && with[1..].iter().all(|&has| has));
}

#[test]
fn mistakes_are_errors() {
    let mut model = build(&debug(50)).unwrap();
    let message = model.forward(&batch(50)).unwrap_err().to_string();
    assert!(message.contains("tok_embeddings") && message.contains("materialize"), "{message}");
    model.materialize(&HOW, &Grid::single()).unwrap();
    // A token beyond the vocabulary.
    let message = model.forward(&batch(60)).unwrap_err().to_string();
    assert!(message.contains("tok_embeddings"), "{message}");
    assert!(Batch::new(Tensor::zeros([3], (Kind::Int64, Device::Cpu)), None).is_err());
    assert!(Documents::from_ids(&[0, 0, 1], 2).is_err());
    assert!(Documents::from_lengths(vec![vec![2, 1], vec![4]]).is_err());
    assert!(Documents::from_lengths(vec![vec![3, 0]]).is_err());
    assert!(matches!(Rope::new(7, 1e4, None), Err(Error::Config(_))));
    let q = normal(0, &[1, 4, 2, 4]);
    let mut wrong = Batch::new(Tensor::zeros([1, 4], (Kind::Int64, Device::Cpu)), None).unwrap();
    wrong.documents = Some(Documents::from_lengths(vec![vec![2, 3]]).unwrap());
    assert!(Sdpa.forward(&q, &q, &q, &wrong).is_err());
    let mut two = Head::new(
        "output",
        Box::new(Plain::new(vec![
            Projection::new("a", 4, 4, Distribution::Constant(0.0)),
            Projection::new("b", 4, 4, Distribution::Constant(0.0)),
        ])),
    );
    assert!(two.forward(&normal(0, &[1, 4, 4]), &wrong).is_err());
}

#[test]
fn gradients_of_a_chunked_loss_are_summed_and_scaled_in_single_precision() {
    // Many chunks, and a divisor whose inverse bf16 does not have.
    let tokens = 384;
    let head = |kind| {
        let projection = Projection::new("output", 16, 40, Distribution::Normal { mean: 0.0, std: 0.5 });
        projection.weight.materialize(1, Kind::BFloat16, Device::Cpu, &Grid::single()).unwrap();
        projection
            .weight
            .set_value(Some(projection.weight.local().unwrap().detach().to_kind(kind).set_requires_grad(true)));
        Plain::new(vec![projection])
    };
    let labels = (Tensor::arange(tokens, (Kind::Int64, Device::Cpu)) * 7).remainder(40).view([1, tokens]);
    let gradient = |kind, held| {
        use ferrotitan_nn::Linear as _;
        let head = head(kind);
        let hidden = normal(3, &[1, tokens as usize, 16]).to_kind(Kind::BFloat16).to_kind(kind).set_requires_grad(true);
        let loss = ChunkedCrossEntropy { logits: held }.forward(&hidden, &head, &labels).unwrap();
        (&loss / 24_576.0).backward();
        let weight = head.projections()[0].weight.leaf().unwrap().grad();
        [hidden.grad().to_kind(Kind::Double), weight.to_kind(Kind::Double)]
    };
    let off = |ours: &Tensor, exact: &Tensor| ((ours - exact).norm() / exact.norm()).double_value(&[]);
    let [exact_hidden, exact_weight] = gradient(Kind::Double, usize::MAX);
    let [whole_hidden, whole_weight] = gradient(Kind::BFloat16, usize::MAX);
    let [hidden, weight] = gradient(Kind::BFloat16, 40 * 6);
    // Chunks lose no more than the products' own rounding does.
    assert!(
        off(&weight, &exact_weight) < 1.2 * off(&whole_weight, &exact_weight),
        "{} {}",
        off(&weight, &exact_weight),
        off(&whole_weight, &exact_weight)
    );
    assert!(off(&hidden, &exact_hidden) < 1.2 * off(&whole_hidden, &exact_hidden));
    // No common factor: it would show as a bias.
    let factor =
        ((&weight * &exact_weight).sum(Kind::Double) / exact_weight.square().sum(Kind::Double)).double_value(&[]);
    assert!((factor - 1.0).abs() < 5e-4, "{factor}");
}

#[test]
fn rotations_of_other_positions_are_other_rotations() {
    let rope = Rope::new(8, 10_000.0, None).unwrap();
    let positions = Tensor::arange(6, (Kind::Int64, Device::Cpu)).unsqueeze(0);
    let first = rope.rotations(&positions, Kind::Double).unwrap();
    let shifted = rope.clone().rotations(&(&positions + 1), Kind::Double).unwrap();
    assert!((first.narrow(1, 1, 5) - shifted.narrow(1, 0, 5)).abs().max().double_value(&[]) < 1e-15);
    assert_eq!(rope.rotations(&positions, Kind::Float).unwrap().kind(), Kind::ComplexFloat);
    assert_eq!(rope.rotations(&positions, Kind::Double).unwrap(), first);
}
