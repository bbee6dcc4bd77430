//! Activations that travel in eight bits: the same bits as a cast behind the gather, and fewer of them on the way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ferrotitan_float8::comm::{DeviceMesh, Event, Op};
use ferrotitan_float8::nn::llama::build;
use ferrotitan_float8::nn::{
    Activation, ActivationCheckpoint, Error, Gemm, Materialize, Model, Packed, Seam, Transform,
};
use ferrotitan_float8::tch::{Device, Kind, Tensor, no_grad};
use ferrotitan_float8::{Float8, Options, Recipe};
use ferrotitan_tp::{Plan, TensorParallel};

use crate::support::{Outcome, batch, config, degrees, on, rank_with, step};

/// The products of another `Gemm`, which take activations as they are.
#[derive(Debug)]
struct CastBehind(Arc<dyn Gemm>);

impl Gemm for CastBehind {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
        self.0.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
        self.0.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>, Error> {
        self.0.weight_gradient(dy, x, weight)
    }
}

/// Puts the weight gradients' products by, as a pipeline does, and hands packing on.
#[derive(Debug)]
struct Later {
    inner: Arc<dyn Gemm>,
    queue: Queue,
}

type Queue = Arc<Mutex<Vec<Put>>>;

/// Whose product it is, the gradient of the output, the input, and the weight.
type Put = (Arc<dyn Gemm>, Tensor, Tensor, Tensor);

impl Gemm for Later {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
        self.inner.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
        self.inner.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>, Error> {
        let put = (Arc::clone(&self.inner), dy.shallow_clone(), x.detach(), weight.shallow_clone());
        self.queue.lock().unwrap().push(put);
        Ok(None)
    }

    fn pack(&self, activation: Activation, part: &Tensor) -> Result<Option<Packed>, Error> {
        self.inner.pack(activation, part)
    }

    fn of_packed(&self, activation: Activation, packed: &Packed) -> Option<Arc<dyn Gemm>> {
        let inner = self.inner.of_packed(activation, packed)?;
        Some(Arc::new(Self { inner, queue: Arc::clone(&self.queue) }))
    }
}

fn wrap(model: &mut Model, with: impl Fn(Arc<dyn Gemm>) -> Arc<dyn Gemm>) {
    for (_, seam) in model.seams() {
        let Seam::Linear(linear) = seam else { continue };
        for projection in linear.projections_mut().iter_mut().filter(|projection| !projection.gemm.is_native()) {
            projection.gemm = with(Arc::clone(&projection.gemm));
        }
    }
}

fn behind(model: &mut Model) {
    wrap(model, |gemm| Arc::new(CastBehind(gemm)));
}

fn recompute(model: &mut Model) {
    for named in model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers.")) {
        named.wrap(|block| Box::new(ActivationCheckpoint::new(block)));
    }
}

/// How the ranks of a test work.
#[derive(Clone)]
struct Case {
    options: Options,
    tensor_parallel: ferrotitan_tp::Options,
    /// Ranks that shard, and ranks that share products.
    mesh: (usize, usize),
    kind: Kind,
    compute: Option<Kind>,
}

impl Default for Case {
    fn default() -> Self {
        let (options, tensor_parallel) = (Options::default(), ferrotitan_tp::Options::default());
        Self { options, tensor_parallel, mesh: (1, 2), kind: Kind::Float, compute: Some(Kind::BFloat16) }
    }
}

/// What a rank found in its last step.
struct Found {
    outcome: Outcome,
    histories: BTreeMap<String, [Vec<f32>; 3]>,
    /// What it gathered from those that share its products.
    gathers: Vec<Event>,
}

fn train(case: &Case, change: impl Fn(&mut Model) + Sync) -> Vec<Found> {
    on(degrees(case.mesh.0, case.mesh.1), |mesh: DeviceMesh| {
        let mut rank = rank_with(&mesh, &case.options, case.tensor_parallel, case.kind, case.compute, &change)?;
        rank.float8.precompute_scales()?;
        if case.options.delayed.is_some() {
            step(&mut rank, &mesh)?;
        }
        let mark = mesh.recorder().mark();
        let outcome = step(&mut rank, &mesh)?;
        let mut gathers = mesh.recorder().since(mark);
        gathers.retain(|event| event.op == Op::AllGather && &*event.group == "tp");
        Ok(Found { outcome, histories: rank.float8.histories(), gathers })
    })
}

fn in_eight_bits(event: &&Event) -> bool {
    matches!(event.kind, Kind::Float8e4m3fn | Kind::Float8e5m2)
}

fn assert_equal(found: &[Found], expected: &[Found]) {
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.outcome.0, expected.outcome.0);
        for (name, (_, gradient)) in &found.outcome.1 {
            assert!(gradient.equal(&expected.outcome.1[name].1), "{name}");
        }
        assert_eq!(found.histories, expected.histories);
    }
}

#[test]
fn a_cast_before_the_gather_gives_the_bits_of_one_behind_it() {
    let case = Case::default;
    let of = |options| Case { options, ..case() };
    let sent = Options {
        enable_fsdp_float8_all_gather: true,
        precompute_float8_dynamic_scale_for_fsdp: true,
        global_activation_scales: true,
        ..Options::default()
    };
    let whole = ferrotitan_tp::Options { sequence_parallel: false, ..Default::default() };
    let cases = [
        case(),
        Case { mesh: (1, 1), ..case() },
        // Neither the sequence nor the heads divide by three.
        Case { mesh: (1, 3), compute: None, ..case() },
        Case { mesh: (1, 2), kind: Kind::Double, compute: None, ..case() },
        Case { mesh: (2, 2), options: sent, ..case() },
        Case { tensor_parallel: whole, ..case() },
        of(Options { power_of_two: true, ..Options::default() }),
        of(Options { delayed: Some(2), ..Options::default() }),
        of(Options { emulate: true, filter_fqns: vec!["wk".into(), "output".into()], ..Options::default() }),
    ];
    for case in cases {
        let expected = train(&case, behind);
        assert!(!expected.iter().flat_map(|found| &found.gathers).any(|event| in_eight_bits(&event)));
        let found = train(&case, |_| ());
        let travels = case.mesh.1 > 1 && case.tensor_parallel.sequence_parallel;
        assert_eq!(found.iter().flat_map(|found| &found.gathers).any(|event| in_eight_bits(&event)), travels);
        assert_equal(&found, &expected);
        assert_equal(&train(&case, recompute), &expected);
    }
}

#[test]
fn a_byte_travels_for_an_element() {
    for (compute, size) in [(Some(Kind::BFloat16), 2), (None, 4)] {
        let case = Case { compute, ..Case::default() };
        for (found, behind) in train(&case, |_| ()).iter().zip(train(&case, behind)) {
            assert_eq!(found.gathers.len(), behind.gathers.len());
            for (ours, theirs) in found.gathers.iter().zip(&behind.gathers) {
                assert_eq!(ours.shape, theirs.shape);
                assert_eq!(ours.bytes * if in_eight_bits(&ours) { size } else { 1 }, theirs.bytes);
            }
            // Of two blocks, two inputs each, forward and again backward, and two gradients. Embedding and head are as ever.
            let count = |kind| found.gathers.iter().filter(|event| event.kind == kind).count();
            assert_eq!((count(Kind::Float8e4m3fn), count(Kind::Float8e5m2)), (2 * 2 * 2, 2 * 2));
        }
    }
}

/// A head in eight bits reads what it gathers, in the model's dtype, and casts it again by the scale that it came in.
#[test]
fn a_head_gathers_codes_too() {
    for loss_parallel in [true, false] {
        let options = Options { filter_fqns: Vec::new(), ..Options::default() };
        let tensor_parallel = ferrotitan_tp::Options { loss_parallel, ..Default::default() };
        let case = Case { options, tensor_parallel, ..Case::default() };
        let (found, expected) = (train(&case, |_| ()), train(&case, behind));
        assert_equal(&found, &expected);
        assert_eq!(found[0].gathers.iter().filter(in_eight_bits).count(), 2 * 6 + 1);
    }
}

#[test]
fn what_is_not_cast_alike_travels_as_it_is() {
    let count = |options| {
        let found = train(&Case { options, ..Case::default() }, |_| ());
        found[0].gathers.iter().filter(in_eight_bits).count()
    };
    // One projection of the first input is left out.
    assert_eq!(count(Options { filter_fqns: vec!["wk".into(), "output".into()], ..Options::default() }), 2 * 4);
    for recipe in [Recipe::Rowwise, Recipe::RowwiseWithGwHp, Recipe::Mxfp8] {
        assert_eq!(count(Options::of(recipe)), 0);
    }
}

/// In fp64, where a scale of its own for each piece would show.
#[test]
fn pieces_share_one_scale() {
    let case = Case { kind: Kind::Double, compute: None, ..Case::default() };
    let pieces = ferrotitan_tp::Options { async_tp: true, ..case.tensor_parallel };
    let whole = train(&case, |_| ());
    for (found, expected) in train(&Case { tensor_parallel: pieces, ..case }, |_| ()).iter().zip(&whole) {
        assert!((found.outcome.0 / expected.outcome.0 - 1.0).abs() < 1e-12);
        for (name, (_, gradient)) in &found.outcome.1 {
            let expected = &expected.outcome.1[name].1;
            let off = ((gradient - expected).abs().max() / expected.abs().max()).double_value(&[]);
            assert!(off < 1e-10, "{name} is off by {off}");
        }
        // Four pieces a crossing, but for the two inputs that are gathered again.
        assert_eq!(found.gathers.iter().filter(in_eight_bits).count(), 2 * (2 * 4 + 2 + 2 * 4));
    }
}

#[test]
fn packed_products_may_come_later() {
    let gradients = |defers: bool| {
        on(degrees(1, 2), |mesh| {
            let queue = Queue::default();
            let later = |inner| Arc::new(Later { inner, queue: Arc::clone(&queue) }) as Arc<dyn Gemm>;
            // Without shards, which would have to be told of what comes late.
            let (mut model, how) = (build(&config())?, ferrotitan_tp::Options::default());
            TensorParallel::new(mesh.clone(), how, Plan::llama(&config())).apply(&mut model, &mesh)?;
            Float8::new(Options::default()).with_mesh(&mesh).attach(&mut model)?;
            if defers {
                wrap(&mut model, later);
            }
            model
                .materialize(&Materialize { seed: 2, kind: Kind::Float, compute: None, device: Device::Cpu }, &mesh)?;
            let mark = mesh.recorder().mark();
            model.forward(&batch(0..2))?.backward();
            let events = mesh.recorder().since(mark);
            let gathers = events.iter().filter(|event| event.op == Op::AllGather).filter(in_eight_bits).count();
            assert_eq!(gathers, 2 * 6);
            for (gemm, dy, x, weight) in queue.lock().unwrap().drain(..) {
                assert_eq!(x.kind(), Kind::Float8e4m3fn);
                let gradient = no_grad(|| gemm.weight_gradient(&dy, &x, &weight))?;
                ferrotitan_ext::autograd::backward(&[weight], &[gradient], true)?;
            }
            let gradients = model.parameters().into_iter().map(|p| p.gradient().unwrap().unwrap().copy());
            Ok(gradients.collect::<Vec<_>>())
        })
    };
    for (now, later) in gradients(false).iter().zip(gradients(true)) {
        assert!(now.iter().zip(&later).all(|(now, later)| now.equal(later)));
    }
}
