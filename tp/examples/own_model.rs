//! A model of one's own, tensor parallel on two rank threads: `cargo run -p ferrotitan-tp --example own_model`.
#![allow(clippy::print_stdout)]

use ferrotitan_comm::mesh::{Degrees, rng::Distribution};
use ferrotitan_nn::{
    Batch, Embedding, Head, Layer, Linear, Materialize, Model, NamedLayer, Parameter, Plain, Projection,
};
use ferrotitan_nn::{Result, RmsNorm, Seam, Transform};
use ferrotitan_tp::comm::threads;
use ferrotitan_tp::tch::{Device, Kind, Tensor};
use ferrotitan_tp::{Options, Plan, Style, TensorParallel};

const INIT: Distribution = Distribution::Normal { mean: 0.0, std: 0.1 };

fn linear(name: String, inputs: usize, outputs: usize) -> Box<dyn Linear> {
    Box::new(Plain::new(vec![Projection::new(&name, inputs, outputs, INIT)]))
}

/// `x + down(gelu(up(norm(x))))`, written for one rank.
#[derive(Debug)]
struct Mlp(RmsNorm, Box<dyn Linear>, Box<dyn Linear>);

impl Layer for Mlp {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> Result<Tensor> {
        let hidden = self.1.forward(&self.0.normalize(x)?)?[0].gelu("none");
        Ok(x + &self.2.forward(&hidden)?[0])
    }

    fn parameters(&self) -> Vec<Parameter> {
        let weight = |linear: &dyn Linear| linear.projections()[0].weight.clone();
        vec![self.0.weight().clone(), weight(&*self.1), weight(&*self.2)]
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        vec![("up".into(), Seam::Linear(&mut self.1)), ("down".into(), Seam::Linear(&mut self.2))]
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for tp in [1, 2] {
        let losses = threads::run(Degrees { tp, ..Degrees::default() }, &threads::Options::default(), |mesh| {
            let mut layers = vec![NamedLayer::new("tokens", Embedding::new("tokens", 101, 16, INIT))];
            for name in ["mlps.0", "mlps.1"] {
                let norm = RmsNorm::new(&format!("{name}.norm"), 16, 1e-5);
                let (up, down) = (linear(format!("{name}.up"), 16, 40), linear(format!("{name}.down"), 40, 16));
                layers.push(NamedLayer::new(name, Mlp(norm, up, down)));
            }
            layers.push(NamedLayer::new("head", Head::new("head", linear("head".into(), 16, 101))));
            let mut model = Model::new(layers);
            let plan = Plan::new([
                ("{tokens,head}.weight", Style::Vocabulary),
                ("*.up.weight", Style::Column),
                ("*.down.weight", Style::Row),
                ("*.norm.weight", Style::Replicated),
            ])?;
            TensorParallel::new(mesh.clone(), Options::default(), plan).apply(&mut model, &mesh)?;
            model
                .materialize(&Materialize { seed: 0, kind: Kind::Double, compute: None, device: Device::Cpu }, &mesh)?;
            let tokens = Tensor::arange(30, (Kind::Int64, Device::Cpu)).view([2, 15]);
            let loss = model.forward(&Batch::new(tokens.shallow_clone(), Some(tokens + 1))?)?;
            loss.backward();
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(loss.double_value(&[]))
        })?;
        println!("{tp} rank(s): losses {losses:?}");
    }
    Ok(())
}
