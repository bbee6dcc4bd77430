//! A model of one's own, tensor parallel on two rank threads: `cargo run -p ferrotitan-tp --example own_model`.
#![allow(clippy::print_stdout)]

use ferrotitan_tp::comm::{BoxError, mesh::Degrees, threads};
use ferrotitan_tp::nn::mesh::rng::Distribution;
use ferrotitan_tp::nn::*;
use ferrotitan_tp::tch::{Device, Kind, Tensor};
use ferrotitan_tp::{Options, Plan, Style, TensorParallel};

const INIT: Distribution = Distribution::Normal { mean: 0.0, std: 0.5 };

fn linear(name: &str, inputs: usize, outputs: usize) -> Box<dyn Linear> {
    Box::new(Plain::new(vec![Projection::new(name, inputs, outputs, INIT)]))
}

/// `down(gelu(up(x)))`, written for one rank.
#[derive(Debug)]
struct Mlp([Box<dyn Linear>; 2]);

impl Layer for Mlp {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> Result<Tensor> {
        let hidden = self.0[0].forward(x)?[0].gelu("none");
        Ok(self.0[1].forward(&hidden)?.remove(0))
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.0.iter().map(|linear| linear.projections()[0].weight.clone()).collect()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        self.0.iter_mut().map(|linear| (String::new(), Seam::Linear(linear))).collect()
    }
}

fn main() -> Result<(), BoxError> {
    for tp in [1, 2] {
        let losses = threads::run(Degrees { tp, ..Degrees::default() }, &threads::Options::default(), |mesh| {
            let mut model = Model::new(vec![
                NamedLayer::new("tokens", Embedding::new("tokens", 101, 16, INIT)),
                NamedLayer::new("mlp.0", Mlp([linear("mlp.0.up", 16, 40), linear("mlp.0.down", 40, 16)])),
                NamedLayer::new("mlp.1", Mlp([linear("mlp.1.up", 16, 40), linear("mlp.1.down", 40, 16)])),
                NamedLayer::new("head", Head::new("head", linear("head", 16, 101))),
            ]);
            let plan = Plan::new([
                ("{tokens,head}.weight", Style::Vocabulary),
                ("*.up.weight", Style::Column),
                ("*.down.weight", Style::Row),
            ])?;
            TensorParallel::new(mesh.clone(), Options::default(), plan).apply(&mut model, &mesh)?;
            model
                .materialize(&Materialize { seed: 0, kind: Kind::Double, compute: None, device: Device::Cpu }, &mesh)?;
            let tokens = Tensor::arange(30, (Kind::Int64, Device::Cpu)).view([2, 15]);
            let loss = model.forward(&Batch::new(tokens.shallow_clone(), Some(tokens + 1))?)?;
            loss.backward();
            Ok::<_, BoxError>(loss.double_value(&[]))
        })?;
        println!("the loss on each of {tp} rank(s): {losses:?}");
    }
    Ok(())
}
