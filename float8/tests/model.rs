//! On one rank: what is converted, what is refused, and what is computed again.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};

use ferrotitan_float8::comm::DeviceMesh;
use ferrotitan_float8::nn::llama::{LlamaConfig, build};
use ferrotitan_float8::nn::mesh::{Degrees, Parts, View};
use ferrotitan_float8::nn::{
    ActivationCheckpoint, Batch, Error, Gemm, Layer, Materialize, Model, RmsNorm, Seam, Transform,
};
use ferrotitan_float8::tch::{Device, Kind, Tensor, no_grad, set_num_threads};
use ferrotitan_float8::{AUTO_FILTER, Float8, Options, Recipe};

fn config() -> LlamaConfig {
    LlamaConfig {
        dim: 64,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        hidden_dim: 96,
        ..LlamaConfig::flavor("debugmodel", 80).unwrap()
    }
}

fn batch() -> Batch {
    let tokens = (Tensor::arange(48, (Kind::Int64, Device::Cpu)).view([2, 24]) * 7).remainder(80);
    Batch::new(tokens.shallow_clone(), Some((tokens + 3).remainder(80))).unwrap()
}

fn materialize(model: &mut Model, compute: Option<Kind>) {
    set_num_threads(1);
    let how = Materialize { seed: 1, kind: Kind::Float, compute, device: Device::Cpu };
    model.materialize(&how, &DeviceMesh::single(Device::Cpu)).unwrap();
}

fn filters(names: &[&str]) -> Options {
    Options { filter_fqns: names.iter().map(|&name| name.to_owned()).collect(), ..Options::default() }
}

fn refusal(options: Options, config: &LlamaConfig) -> String {
    Float8::new(options).attach(&mut build(config).unwrap()).unwrap_err().to_string()
}

#[test]
fn converts_all_but_what_is_filtered() {
    let handle = Float8::new(Options::default()).attach(&mut build(&config()).unwrap()).unwrap();
    assert_eq!(handle.converted().count(), 14);
    assert_eq!(handle.left_out().len(), 1);
    assert_eq!(handle.left_out()[0].0, "output.weight");

    let handle = Float8::new(filters(&["wk", "layers.1", "output"])).attach(&mut build(&config()).unwrap()).unwrap();
    assert_eq!(
        handle.converted().collect::<Vec<_>>(),
        ["wq", "wv", "wo", "w1", "w3", "w2"].map(|part| match part.len() {
            2 if part.starts_with("w") && part.as_bytes()[1].is_ascii_digit() =>
                format!("layers.0.feed_forward.{part}.weight"),
            _ => format!("layers.0.attention.{part}.weight"),
        })
    );

    // 90 is no multiple of 16, and 80 one of 16 but not of 32.
    let odd = LlamaConfig { hidden_dim: 90, ..config() };
    let handle = Float8::new(filters(&[])).attach(&mut build(&odd).unwrap()).unwrap();
    assert_eq!(handle.converted().filter(|name| name.contains("feed_forward")).count(), 0);
    assert!(handle.left_out()[0].1.contains("64 inputs and 90 outputs"), "{:?}", handle.left_out());
    assert!(handle.converted().any(|name| name == "output.weight"));
    let mx = Options { recipe: Recipe::Mxfp8, ..filters(&[]) };
    let handle = Float8::new(mx).attach(&mut build(&odd).unwrap()).unwrap();
    assert!(!handle.converted().any(|name| name == "output.weight"));

    // A tied head's weight has the embedding's name, but its seam is called output.
    let tied = LlamaConfig { tied_embeddings: true, ..config() };
    let handle = Float8::new(Options::default()).attach(&mut build(&tied).unwrap()).unwrap();
    assert_eq!(handle.left_out()[0].0, "tok_embeddings.weight");
}

#[test]
fn the_automatic_filter_leaves_out_small_products() {
    let wide = LlamaConfig { dim: 512, hidden_dim: 1024, n_heads: 8, n_kv_heads: 1, n_layers: 1, ..config() };
    let handle = Float8::new(filters(&["output", AUTO_FILTER])).attach(&mut build(&wide).unwrap()).unwrap();
    // One key-value head is 64 wide.
    let left_out: Vec<_> = handle.left_out().iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(left_out, ["layers.0.attention.wk.weight", "layers.0.attention.wv.weight", "output.weight"]);
    assert!(refusal(filters(&[AUTO_FILTER]), &config()).contains("no projection is left"));
}

#[test]
fn contradictions_are_refused() {
    let message = refusal(filters(&["output", "feedforward"]), &config());
    assert!(
        message.contains("\"feedforward\" matches nothing") && message.contains("layers.1.feed_forward.w2"),
        "{message}"
    );
    assert!(refusal(filters(&["layers", "output"]), &config()).contains("no projection is left"));
    assert!(Float8::new(filters(&["head"])).check(["output.weight"]).is_err());
    assert!(Float8::new(Options::default()).check(["output.weight", "layers.0.w.weight"]).is_ok());

    for recipe in [Recipe::Rowwise, Recipe::RowwiseWithGwHp, Recipe::Mxfp8] {
        let message = refusal(Options { enable_fsdp_float8_all_gather: true, ..Options::of(recipe) }, &config());
        assert!(
            message.contains("enable_fsdp_float8_all_gather needs") && message.contains(recipe.name()),
            "{message}"
        );
        assert!(
            refusal(Options { delayed: Some(4), ..Options::of(recipe) }, &config()).contains("delayed scaling needs")
        );
    }
    assert!(refusal(Options { delayed: Some(0), ..Options::default() }, &config()).contains("at least one step"));
    let lonely = Options { precompute_float8_dynamic_scale_for_fsdp: true, ..Options::default() };
    assert!(refusal(lonely, &config()).contains("switch it on"));

    let mut model = build(&config()).unwrap();
    Float8::new(Options::default()).attach(&mut model).unwrap();
    let message = Float8::new(Options::default()).attach(&mut model).unwrap_err().to_string();
    assert!(message.contains("layers.0.attention.wq.weight") && message.contains("replaced already"), "{message}");

    let mut model = build(&config()).unwrap();
    let parameter = model.parameters().into_iter().find(|parameter| parameter.name().contains("wq")).unwrap();
    parameter.set_layout(parameter.layout().shard(View::TP, 0, Parts::Even).unwrap());
    let message = Float8::new(Options::default()).attach(&mut model).unwrap_err().to_string();
    assert!(message.contains("with_mesh"), "{message}");

    let mesh = ferrotitan_float8::comm::fake::mesh(Degrees { tp: 2, ..Degrees::default() }, 1, Device::Cpu).unwrap();
    let float8 = Float8::new(Options::default()).with_mesh(&mesh);
    let message =
        float8.apply(&mut build(&config()).unwrap(), &DeviceMesh::single(Device::Cpu)).unwrap_err().to_string();
    assert!(message.contains("made for rank 1"), "{message}");
    float8.apply(&mut build(&config()).unwrap(), &mesh).unwrap();
    assert_eq!(float8.handles()[0].converted().count(), 14);
}

#[test]
fn what_is_not_finite_is_reported_by_name() {
    for recipe in Recipe::ALL {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut model = build(&config()).unwrap();
            Float8::new(Options::of(recipe)).attach(&mut model).unwrap();
            materialize(&mut model, Some(Kind::BFloat16));
            let name = "layers.1.feed_forward.w3.weight";
            let parameter = model.parameters().into_iter().find(|parameter| parameter.name() == name).unwrap();
            let _ = no_grad(|| parameter.local().unwrap().get(5).get(6).fill_(bad));
            let message = model.forward(&batch()).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains("the weight"), "{message}");
        }
    }
    // In a gradient, by the backward pass.
    let mut model = build(&config()).unwrap();
    Float8::new(Options::default()).attach(&mut model).unwrap();
    materialize(&mut model, None);
    let loss = model.forward(&batch()).unwrap() * f64::NAN;
    let message = ferrotitan_ext::autograd::backward(&[loss], &[None], false).unwrap_err().to_string();
    assert!(message.contains("layers.1.feed_forward.w2.weight: the gradient"), "{message}");
}

fn gradients(model: &mut Model) -> Vec<(String, Tensor)> {
    model.parameters().iter().for_each(|parameter| parameter.clear_gradient().unwrap());
    model.forward(&batch()).unwrap().backward();
    let parameters = model.parameters();
    parameters.iter().map(|p| (p.name().to_owned(), p.gradient().unwrap().unwrap().copy())).collect()
}

#[test]
fn recomputed_casts_give_the_same_bits() {
    let delayed = Options { delayed: Some(4), ..Options::default() };
    for options in Recipe::ALL.map(Options::of).into_iter().chain([delayed]) {
        let run = |checkpoint: bool| {
            let mut model = build(&config()).unwrap();
            let handle = Float8::new(options.clone()).attach(&mut model).unwrap();
            for named in model.layers_mut().iter_mut().filter(|named| checkpoint && named.name.starts_with("layers.")) {
                let inner =
                    std::mem::replace(&mut named.layer, Box::new(RmsNorm::new("unused", 1, 1.0)) as Box<dyn Layer>);
                named.layer = Box::new(ActivationCheckpoint::new(inner));
            }
            materialize(&mut model, Some(Kind::BFloat16));
            gradients(&mut model);
            handle.finish_gradients().unwrap();
            (gradients(&mut model), handle)
        };
        let ((kept, one), (again, other)) = (run(false), run(true));
        assert_eq!(kept.len(), again.len());
        for ((name, kept), (_, again)) in kept.iter().zip(&again) {
            assert!(kept.equal(again), "{}: {name}", options.recipe);
        }
        assert_eq!(one.histories(), other.histories());
    }
}

/// Puts weight gradients by, as a pipeline does, and computes them when it is asked to.
#[derive(Debug)]
struct Later(Arc<dyn Gemm>, Arc<Mutex<Vec<Put>>>);

/// A product that was put by: whose it is, the gradient of the output, the input, and the weight.
type Put = (Arc<dyn Gemm>, Tensor, Tensor, Tensor);

impl Gemm for Later {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
        self.0.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
        self.0.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>, Error> {
        let put = (Arc::clone(&self.0), dy.shallow_clone(), x.shallow_clone(), weight.shallow_clone());
        self.1.lock().unwrap().push(put);
        Ok(None)
    }
}

#[test]
fn deferred_weight_gradients_are_the_same_bits() {
    for recipe in Recipe::ALL {
        let run = |defers: bool| {
            let mut model = build(&config()).unwrap();
            Float8::new(Options::of(recipe)).attach(&mut model).unwrap();
            let queue: Arc<Mutex<Vec<Put>>> = Arc::default();
            for (_, seam) in model.seams() {
                let Seam::Linear(linear) = seam else { continue };
                for projection in linear.projections_mut().iter_mut().filter(|_| defers) {
                    projection.gemm = Arc::new(Later(Arc::clone(&projection.gemm), Arc::clone(&queue)));
                }
            }
            materialize(&mut model, Some(Kind::BFloat16));
            model.forward(&batch()).unwrap().backward();
            for (gemm, dy, x, weight) in queue.lock().unwrap().drain(..) {
                let gradient = no_grad(|| gemm.weight_gradient(&dy, &x, &weight)).unwrap();
                ferrotitan_ext::autograd::backward(&[weight], &[gradient], true).unwrap();
            }
            model.parameters().iter().map(|p| p.gradient().unwrap().unwrap().copy()).collect::<Vec<_>>()
        };
        assert!(run(false).iter().zip(run(true)).all(|(now, later)| now.equal(&later)), "{recipe}");
    }
}

#[test]
fn products_are_really_in_eight_bits() {
    // Each recipe's gradients differ from bf16's by the noise of eight bits: not by nothing, and not by everything.
    let run = |options: Option<Options>| {
        let mut model = build(&config()).unwrap();
        if let Some(options) = options {
            Float8::new(options).attach(&mut model).unwrap();
        }
        materialize(&mut model, None);
        gradients(&mut model)
    };
    let exact = run(None);
    let emulated = |recipe| Options { emulate: true, ..Options::of(recipe) };
    for options in Recipe::ALL.map(Options::of).into_iter().chain(Recipe::ALL.map(emulated)) {
        for ((name, exact), (_, found)) in exact.iter().zip(run(Some(options.clone()))) {
            let off = ((exact - &found).norm() / exact.norm()).double_value(&[]);
            // An embedding's gradient comes for the most part past the projections.
            let least = if name.starts_with("layers.") && !name.contains("norm") { 0.005 } else { 1e-6 };
            assert!((least..0.3).contains(&off), "{}: {name} differs by {off}", options.recipe);
        }
    }
}

#[test]
fn delayed_scales_follow_the_history() {
    let mut model = build(&config()).unwrap();
    let float8 = || Float8::new(Options { delayed: Some(2), ..Options::default() });
    let handle = float8().attach(&mut model).unwrap();
    materialize(&mut model, None);
    let name = "layers.0.attention.wq.weight";
    let weight = model.parameters().into_iter().find(|parameter| parameter.name() == name).unwrap();
    let mut largest = Vec::new();
    for step in 0..3 {
        // The first step has no history, and scales by what it finds.
        gradients(&mut model);
        largest.push(weight.local().unwrap().abs().max().double_value(&[]) as f32);
        assert_eq!(handle.histories()[name][0].len(), step.min(2));
        handle.finish_gradients().unwrap();
        let _ = no_grad(|| weight.local().unwrap().detach().multiply_(&Tensor::from(0.5_f32)));
    }
    let histories = handle.histories();
    assert_eq!(histories[name][1], largest[1..]);
    assert!(histories.values().flatten().all(|steps| steps.len() == 2 && steps.iter().all(|&amax| amax > 0.0)));

    // A model that goes on from there computes the same.
    let continued = gradients(&mut model);
    let mut resumed = build(&config()).unwrap();
    let other = float8().attach(&mut resumed).unwrap();
    materialize(&mut resumed, None);
    for (target, source) in resumed.parameters().iter().zip(model.parameters()) {
        no_grad(|| target.local().unwrap().detach().copy_(&source.local().unwrap().detach()));
    }
    let mut partial = histories.clone();
    partial.remove(name);
    assert!(other.restore(&partial).unwrap_err().to_string().contains(name));
    other.restore(&histories).unwrap();
    assert!(gradients(&mut resumed).iter().zip(&continued).all(|((_, a), (_, b))| a.equal(b)));

    // What outgrows the history saturates: the weight is read as no more than it was.
    let mut seams = model.seams();
    let Some((_, Seam::Linear(linear))) = seams.first_mut() else { panic!("wqkv is the first seam") };
    let gemm = linear.projections()[0].gemm.clone();
    let most = histories[name][0].iter().copied().fold(0.0, f32::max);
    let x = Tensor::full([1, 64], f64::from(most), (Kind::Float, Device::Cpu));
    let w = Tensor::zeros([64, 64], (Kind::Float, Device::Cpu));
    let _ = w.get(0).get(0).fill_(100.0);
    let read = gemm.output(&x, &w).unwrap().get(0).get(0).double_value(&[]);
    assert!((read / f64::from(largest[1] * most) - 1.0).abs() < 1e-6, "{read} of {largest:?}");
}
