//! Two ranks on two threads run four microbatches through two hand-written stages.
#![allow(clippy::print_stdout)]

use ferrotitan_mesh::rng::Distribution;
use ferrotitan_mesh::{Degrees, Mesh};
use ferrotitan_pp::comm::threads::{Options, run};
use ferrotitan_pp::nn::{Batch, Embedding, Head, Materialize, Model, NamedLayer, Plain, Projection, RmsNorm};
use ferrotitan_pp::schedule::{Algorithm, LoweringOptions, lower};
use ferrotitan_pp::tch::{Device, Kind, Tensor};
use ferrotitan_pp::{Activations, Partition, Pipeline, Split, microbatches};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Width.
const DIM: usize = 16;
/// Number of tokens.
const WORDS: usize = 10;

fn model() -> Model {
    let init = Distribution::Normal { mean: 0.0, std: 0.25 };
    Model::new(vec![
        NamedLayer::new("embedding", Embedding::new("embedding", WORDS, DIM, init)),
        NamedLayer::new("norm", RmsNorm::new("norm", DIM, 1e-6)),
        NamedLayer::new(
            "head",
            Head::new("head", Box::new(Plain::new(vec![Projection::new("head", DIM, WORDS, init)]))),
        ),
    ])
}

fn main() -> Result<(), Error> {
    let schedule = Algorithm::OneForwardOneBackward.generate(2, 1, 4)?;
    let reports = run(Degrees { pp: 2, ..Degrees::default() }, &Options::default(), |mesh| -> Result<String, Error> {
        let mut model = model();
        let partition = Partition::of(&model, &Split::default(), &schedule)?;
        partition.keep(&mut model, &mesh)?;
        model.materialize(&Materialize { seed: 1, kind: Kind::Float, compute: None, device: Device::Cpu }, &mesh)?;
        let plan = lower(&schedule, &LoweringOptions::default())?;
        let activations = Activations::new(DIM as i64, Kind::Float);
        let mut pipeline = Pipeline::new(&mesh, partition.stages(model), plan, activations)?;

        // Each token predicts the next word of a circle.
        let tokens = Tensor::arange(80, (Kind::Int64, Device::Cpu)).remainder(WORDS as i64).reshape([8, 10]);
        let batch = Batch::new(tokens.shallow_clone(), Some((tokens + 1).remainder(WORDS as i64)))?;
        let mut losses = Vec::new();
        for _ in 0..20 {
            losses.push(pipeline.step(&microbatches(&batch, 4)?, 80.0)?.double_value(&[]) / 80.0);
            for parameter in pipeline.parameters() {
                let gradient = parameter.gradient()?.ok_or("every parameter has a gradient")?;
                let _ = parameter.local()?.detach().subtract_(&gradient);
                parameter.clear_gradient()?;
            }
        }
        let held = pipeline.statistics().peak_live;
        Ok(format!("rank {}: loss {:.3} to {:.3}, {held} microbatches held", mesh.rank(), losses[0], losses[19]))
    })?;
    reports.iter().for_each(|report| println!("{report}"));
    Ok(())
}
