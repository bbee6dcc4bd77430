//! A stage's output is let go once it has been sent. In a program of its own, since it measures the whole process.
#![allow(clippy::unwrap_used)]

use ferrotitan_ext::memory;
use ferrotitan_mesh::Degrees;
use ferrotitan_mesh::rng::Distribution;
use ferrotitan_pp::comm::{BoxError, threads};
use ferrotitan_pp::nn::{self, Batch, Embedding, Layer, Materialize, Model, NamedLayer, Parameter};
use ferrotitan_pp::schedule::{Algorithm, LoweringOptions, lower};
use ferrotitan_pp::{Activations, Partition, Pipeline, Split, microbatches};
use tch::{Device, Kind, Tensor};

/// So that activations are larger than anything that glibc would keep for later.
const FEATURES: usize = 2100;
/// Sequences of as many tokens as features.
const MICROBATCHES: usize = 6;
/// Of one microbatch's activations, in bytes.
const ACTIVATION: u64 = (FEATURES * FEATURES * 8) as u64;

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

#[test]
fn outputs_are_let_go_once_they_are_sent() {
    // The second rank keeps all activations, as its inputs; the first, whose embedding needs none of them, keeps none.
    let schedule = Algorithm::GPipe.generate(2, 1, MICROBATCHES).unwrap();
    let limits = threads::Options { timeout: std::time::Duration::from_secs(40), ..threads::Options::default() };
    let used = threads::run(Degrees { pp: 2, ..Degrees::default() }, &limits, |mesh| -> Result<u64, BoxError> {
        let embedding = Embedding::new("embedding", 16, FEATURES, Distribution::Constant(1.0));
        let mut model = Model::new(vec![NamedLayer::new("embedding", embedding), NamedLayer::new("sum", Sum)]);
        let partition = Partition::of(&model, &Split::default(), &schedule)?;
        partition.keep(&mut model, &mesh)?;
        model.materialize(&Materialize { seed: 0, kind: Kind::Double, compute: None, device: Device::Cpu }, &mesh)?;
        let plan = lower(&schedule, &LoweringOptions::default())?;
        let activations = Activations::new(FEATURES as i64, Kind::Double);
        let mut pipeline = Pipeline::new(&mesh, partition.stages(model), plan, activations)?;
        let tokens = Tensor::ones([MICROBATCHES as i64, FEATURES as i64], (Kind::Int64, Device::Cpu));
        let parts = microbatches(&Batch::new(tokens.shallow_clone(), Some(tokens))?, MICROBATCHES)?;
        mesh.world().barrier()?;
        let before = memory::rss().unwrap_or(0);
        let _ = pipeline.step(&parts, 1.0)?;
        mesh.world().barrier()?;
        Ok(memory::peak_rss().unwrap_or(0) - before)
    });
    // Beside the second rank's inputs, a few are being made or are on their way.
    let used = used.unwrap()[0] / ACTIVATION;
    let least = MICROBATCHES as u64 - 1;
    assert!((least..least + 5).contains(&used), "{used} activations at once");
}
