//! Stages that sleep: a step takes as long as the verifier says.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ferrotitan_mesh::rng::Distribution;
use ferrotitan_pp::nn::{
    Batch, Embedding, Gemm, Layer, Linear, Model, NamedLayer, Native, Parameter, Plain, Projection, Result, Seam,
};
use ferrotitan_pp::schedule::{Algorithm, Costs, LoweringOptions, Schedule, lower, verify};
use ferrotitan_pp::{Activations, Partition, Pipeline, Split, microbatches};
use tch::{Device, Kind, Tensor};

use crate::harness::{HOW, run};

/// What a forward, an input gradient and a weight gradient of a stage take each.
const UNIT: Duration = Duration::from_millis(12);
/// The machine may be busy with other things: the best of so many steps counts.
const ATTEMPTS: usize = 8;
const RANKS: usize = 4;
const MICROBATCHES: usize = 8;
const FEATURES: usize = 4;
const NORMAL: Distribution = Distribution::Normal { mean: 0.0, std: 1.0 };

#[derive(Debug)]
struct Sleepy;

impl Gemm for Sleepy {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        sleep(UNIT);
        Native.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
        sleep(UNIT);
        Native.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
        sleep(UNIT);
        Native.weight_gradient(dy, x, weight)
    }
}

/// One projection.
#[derive(Debug)]
struct Sleeper(Box<dyn Linear>);

impl Sleeper {
    fn new(name: &str) -> Self {
        let mut projection = Projection::new(name, FEATURES, FEATURES, NORMAL);
        projection.gemm = Arc::new(Sleepy);
        Self(Box::new(Plain::new(vec![projection])))
    }
}

impl Layer for Sleeper {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> Result<Tensor> {
        Ok(self.0.forward(x)?.remove(0))
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.0.projections()[0].weight.clone()]
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        vec![("sleeper".into(), Seam::Linear(&mut self.0))]
    }
}

#[derive(Debug)]
struct Sum;

impl Layer for Sum {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> Result<Tensor> {
        Ok(x.sum(x.kind()))
    }

    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }
}

/// The best of several steps, in units; at once when one is fast enough.
fn measure(schedule: &Schedule, enough: f64) -> f64 {
    let times = run(RANKS, |mesh| {
        let mut layers =
            vec![NamedLayer::new("tok_embeddings", Embedding::new("tok_embeddings", 10, FEATURES, NORMAL))];
        for stage in 0..schedule.stages() {
            let name = format!("layers.{stage}");
            layers.push(NamedLayer::new(name.clone(), Sleeper::new(&name)));
        }
        layers.push(NamedLayer::new("output", Sum));
        let mut model = Model::new(layers);
        let split = Split { first_stage_less_layers: 0, last_stage_less_layers: 0, ..Split::default() };
        let partition = Partition::of(&model, &split, schedule)?;
        partition.keep(&mut model, &mesh)?;
        model.materialize(&HOW, &mesh)?;
        let plan = lower(schedule, &LoweringOptions::default())?;
        let activations = Activations::new(FEATURES as i64, Kind::Double);
        let mut pipeline = Pipeline::new(&mesh, partition.stages(model), plan, activations)?;
        let tokens = Tensor::arange(MICROBATCHES as i64, (Kind::Int64, Device::Cpu)).view([-1, 1]);
        let parts = microbatches(&Batch::new(tokens.shallow_clone(), Some(tokens))?, MICROBATCHES)?;
        let mut best = f64::INFINITY;
        for _ in 0..ATTEMPTS {
            mesh.world().barrier()?;
            let start = Instant::now();
            pipeline.step(&parts, 1.0)?;
            mesh.world().barrier()?;
            let units = start.elapsed().as_secs_f64() / UNIT.as_secs_f64();
            best = mesh.world().all_reduce_scalar(units, ferrotitan_pp::comm::ReduceOp::Max)?.min(best);
            if best <= enough {
                break;
            }
        }
        Ok(best)
    });
    times[0]
}

#[test]
fn a_step_takes_what_the_verifier_says() {
    for algorithm in Algorithm::ALL {
        let schedule = algorithm.generate(RANKS, algorithm.default_stages_per_rank(), MICROBATCHES).unwrap();
        let expected = verify(&schedule, &Costs::default()).unwrap().timeline.makespan();
        let found = measure(&schedule, 1.1 * expected);
        println!("{algorithm}: {found:.1} units, the verifier says {expected}");
        assert!((0.99 * expected..=1.1 * expected).contains(&found), "{algorithm}: {found} units, not {expected}");
    }
}

/// ZB1P saves two weight gradients for each rank but one.
#[test]
fn zero_bubble_beats_1f1b_by_what_the_formulas_say() {
    let schedule = |algorithm: Algorithm| algorithm.generate(RANKS, 1, MICROBATCHES).unwrap();
    let expected = 2.0 * (RANKS - 1) as f64;
    let plain = measure(&schedule(Algorithm::OneForwardOneBackward), 33.5);
    let split = measure(&schedule(Algorithm::Zb1p), 27.5);
    println!("1F1B {plain:.1} units, ZB1P {split:.1}, difference expected {expected}");
    assert!((plain - split - expected).abs() <= 0.1 * split, "{plain} and {split} differ by other than {expected}");
}
