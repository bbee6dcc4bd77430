//! A model that is not Llama: a norm within each head, and a gate that no rank splits.

use std::time::Duration;

use ferrotitan_comm::threads;
use ferrotitan_mesh::rng::Distribution;
use ferrotitan_mesh::{Degrees, Grid};
use ferrotitan_nn::{
    Batch, Embedding, Head, Layer, Linear, Model, NamedLayer, Parameter, Plain, Projection, Result, RmsNorm, Seam,
    Transform,
};
use ferrotitan_tp::{Heads, Options, Plan, Style, TensorParallel};
use tch::Tensor;

use crate::support::{HOW, assert_parity, batch, step};

const DIM: usize = 12;
const HEADS: usize = 6;
const SIZE: usize = 4;
const VOCABULARY: usize = 23;
const INIT: Distribution = Distribution::Normal { mean: 0.0, std: 0.3 };

/// `x + sigmoid(gate(n)) * down(norm(up(n)))` with `n = norm(x)`; the inner norm is that of each head.
#[derive(Debug)]
struct Mixer {
    norm: RmsNorm,
    gate: Box<dyn Linear>,
    up: Box<dyn Linear>,
    inner: RmsNorm,
    down: Box<dyn Linear>,
}

impl Mixer {
    fn new(name: &str) -> Self {
        let linear = |part: &str, inputs, outputs| {
            Box::new(Plain::new(vec![Projection::new(&format!("{name}.{part}"), inputs, outputs, INIT)]))
                as Box<dyn Linear>
        };
        Self {
            norm: RmsNorm::new(&format!("{name}.norm"), DIM, 1e-5),
            gate: linear("gate", DIM, DIM),
            up: linear("up", DIM, HEADS * SIZE),
            inner: RmsNorm::new(&format!("{name}.inner"), SIZE, 1e-5),
            down: linear("down", HEADS * SIZE, DIM),
        }
    }
}

impl Layer for Mixer {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        let (b, s) = batch.positions.size2().unwrap();
        let n = self.norm.normalize(x)?;
        let heads = self.up.forward(&n)?.remove(0).view([b, s, -1, SIZE as i64]);
        let mixed = self.inner.normalize(&heads)?.view([b, s, -1]);
        Ok(x + self.gate.forward(&n)?.remove(0).sigmoid() * self.down.forward(&mixed)?.remove(0))
    }

    fn parameters(&self) -> Vec<Parameter> {
        let linears = [&self.gate, &self.up, &self.down];
        let weights = linears.into_iter().flat_map(|linear| linear.projections()).map(|p| p.weight.clone());
        weights.chain([self.norm.weight().clone(), self.inner.weight().clone()]).collect()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        let linears = [("gate", &mut self.gate), ("up", &mut self.up), ("down", &mut self.down)];
        linears.into_iter().map(|(name, linear)| (name.to_owned(), Seam::Linear(linear))).collect()
    }
}

fn model() -> Model {
    let head = Plain::new(vec![Projection::new("head", DIM, VOCABULARY, INIT)]);
    Model::new(vec![
        NamedLayer::new("tokens", Embedding::new("tokens", VOCABULARY, DIM, INIT)),
        NamedLayer::new("mixers.0", Mixer::new("mixers.0")),
        NamedLayer::new("mixers.1", Mixer::new("mixers.1")),
        NamedLayer::new("head", Head::new("head", Box::new(head))),
    ])
}

fn plan() -> Plan {
    let heads = Heads { key_value: HEADS, size: SIZE };
    Plan::new([
        ("{tokens,head}.weight", Style::Vocabulary),
        ("mixers.*.up.weight", Style::ColumnByHeads(heads)),
        ("mixers.*.down.weight", Style::RowByHeads(heads)),
        ("mixers.*.inner.weight", Style::ReplicatedInside),
        ("mixers.*.{norm,gate}.weight", Style::Replicated),
    ])
    .unwrap()
}

#[test]
fn a_plan_of_five_lines_divides_it() {
    let make = || batch(2, 7, VOCABULARY as i64);
    let mut whole = model();
    whole.materialize(&HOW, &Grid::single()).unwrap();
    let expected = step(&mut whole, &make(), &Grid::single());
    let limits = threads::Options { timeout: Duration::from_secs(30), ..threads::Options::default() };
    for (tp, sequence_parallel) in [(2, true), (2, false), (4, true), (4, false)] {
        let options = Options { sequence_parallel, ..Options::default() };
        let ranks = threads::run(Degrees { tp, ..Degrees::default() }, &limits, |mesh| {
            let mut model = model();
            TensorParallel::new(mesh.clone(), options, plan()).apply(&mut model, &mesh)?;
            model.materialize(&HOW, &mesh)?;
            Ok::<_, ferrotitan_nn::Error>(step(&mut model, &make(), &mesh))
        });
        assert_parity(&expected, &ranks.unwrap());
    }
}
