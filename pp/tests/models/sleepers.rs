//! Stages that sleep, so that cores are free while they work.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ferrotitan_mesh::rng::Distribution;
use ferrotitan_pp::comm::{BoxError, DeviceMesh, ReduceOp};
use ferrotitan_pp::nn::{
    self, Batch, Embedding, Gemm, Layer, Linear, Model, NamedLayer, Native, Parameter, Plain, Projection, Seam,
};
use ferrotitan_pp::schedule::{Algorithm, Costs, LoweringOptions, Schedule, lower, verify};
use ferrotitan_pp::{Activations, Partition, Pipeline, Split, microbatches};
use tch::{Device, Kind, Tensor};

use super::llama::HOW;

pub(crate) const RANKS: usize = 4;
const MICROBATCHES: usize = 8;
const FEATURES: usize = 4;
const NORMAL: Distribution = Distribution::Normal { mean: 0.0, std: 1.0 };

/// Native products that take as long as it says, each.
#[derive(Debug)]
struct Sleepy(Duration);

impl Gemm for Sleepy {
    fn output(&self, x: &Tensor, weight: &Tensor) -> nn::Result<Tensor> {
        sleep(self.0);
        Native.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> nn::Result<Tensor> {
        sleep(self.0);
        Native.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> nn::Result<Option<Tensor>> {
        sleep(self.0);
        Native.weight_gradient(dy, x, weight)
    }
}

/// One projection.
#[derive(Debug)]
struct Sleeper(Box<dyn Linear>);

impl Sleeper {
    fn new(name: &str, unit: Duration) -> Self {
        let mut projection = Projection::new(name, FEATURES, FEATURES, NORMAL);
        projection.gemm = Arc::new(Sleepy(unit));
        Self(Box::new(Plain::new(vec![projection])))
    }
}

impl Layer for Sleeper {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> nn::Result<Tensor> {
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
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> nn::Result<Tensor> {
        Ok(x.sum(x.kind()))
    }

    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }
}

/// A schedule whose stages take a unit of time for a forward, an input gradient and a weight gradient each.
pub(crate) struct Timed {
    pub(crate) algorithm: Algorithm,
    schedule: Schedule,
    /// A step, in units, as the verifier has it.
    pub(crate) makespan: f64,
}

impl Timed {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        let schedule = algorithm.generate(RANKS, algorithm.default_stages_per_rank(), MICROBATCHES).unwrap();
        let makespan = verify(&schedule, &Costs::default()).unwrap().timeline.makespan();
        Self { algorithm, schedule, makespan }
    }

    fn pipeline(&self, mesh: &DeviceMesh, unit: Duration) -> Result<Pipeline, BoxError> {
        let mut layers =
            vec![NamedLayer::new("tok_embeddings", Embedding::new("tok_embeddings", 10, FEATURES, NORMAL))];
        for stage in 0..self.schedule.stages() {
            let name = format!("layers.{stage}");
            layers.push(NamedLayer::new(name.clone(), Sleeper::new(&name, unit)));
        }
        layers.push(NamedLayer::new("output", Sum));
        let mut model = Model::new(layers);
        let split = Split { first_stage_less_layers: 0, last_stage_less_layers: 0, ..Split::default() };
        let partition = Partition::of(&model, &split, &self.schedule)?;
        partition.keep(&mut model, mesh)?;
        model.materialize(&HOW, mesh)?;
        let plan = lower(&self.schedule, &LoweringOptions::default())?;
        Ok(Pipeline::new(mesh, partition.stages(model), plan, Activations::new(FEATURES as i64, Kind::Double))?)
    }

    /// How long a step takes on all ranks, in units. The machine may be busy with other things: the best of so many
    /// `attempts`, or the first that takes `enough` makespans at most.
    pub(crate) fn measure(
        &self,
        mesh: &DeviceMesh,
        unit: Duration,
        attempts: usize,
        enough: f64,
    ) -> Result<f64, BoxError> {
        let mut pipeline = self.pipeline(mesh, unit)?;
        let tokens = Tensor::arange(MICROBATCHES as i64, (Kind::Int64, Device::Cpu)).view([-1, 1]);
        let parts = microbatches(&Batch::new(tokens.shallow_clone(), Some(tokens))?, MICROBATCHES)?;
        let mut best = f64::INFINITY;
        for _ in 0..attempts {
            mesh.world().barrier()?;
            let start = Instant::now();
            let _ = pipeline.step(&parts, 1.0)?;
            mesh.world().barrier()?;
            let units = start.elapsed().as_secs_f64() / unit.as_secs_f64();
            best = mesh.world().all_reduce_scalar(units, ReduceOp::Max)?.min(best);
            if best <= enough * self.makespan {
                break;
            }
        }
        Ok(best)
    }

    /// To 10 %.
    pub(crate) fn assert_near(&self, found: f64) {
        let Self { algorithm, makespan, .. } = self;
        assert!((0.99 * makespan..=1.1 * makespan).contains(&found), "{algorithm}: {found} units, not {makespan}");
    }
}

/// A bubble by its formula, when a rank's share of the layers takes 1 for each of F, I and W.
fn bubble(algorithm: Algorithm) -> f64 {
    let others = (RANKS - 1) as f64;
    match algorithm {
        Algorithm::OneForwardOneBackward => others * 3.0,
        Algorithm::Zb1p => others,
        Algorithm::Interleaved1F1B => others * 3.0 / algorithm.default_stages_per_rank() as f64,
        Algorithm::InterleavedZeroBubble => others / algorithm.default_stages_per_rank() as f64,
        Algorithm::ZbvZeroBubble => others / 2.0,
        _ => panic!("{algorithm} is not compared"),
    }
}

/// What one schedule saves over another is the difference of their formulas to 30 %, which is 3 % of a step or more.
/// Both took so many units.
pub(crate) fn assert_saved(slow: (Algorithm, f64), fast: (Algorithm, f64)) {
    // The same model has stages of half the size when a rank has two.
    let time = |(algorithm, units): (Algorithm, f64)| units / algorithm.default_stages_per_rank() as f64;
    let (found, expected) = (time(slow) - time(fast), bubble(slow.0) - bubble(fast.0));
    eprintln!("{} saves {found:.2} over {}, by the formulas {expected}", fast.0, slow.0);
    assert!((found - expected).abs() <= 0.3 * expected, "{}: {found} saved, not {expected}", fast.0);
}
