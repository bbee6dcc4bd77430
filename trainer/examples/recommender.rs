//! A recommender of one's own: which item comes next in what a user looked at, by a transformer over items in the
//! manner of SASRec (Kang and McAuley 2018, <https://arxiv.org/abs/1808.09781>), with the softmax over all items as its
//! loss.
//!
//! Most of such a model is its table of items. Here its rows are divided twice: among the two ranks of `tp`, which look
//! up and score the items of their own rows alone, and each half among the two ranks of `dp_shard`, which read
//! different users. The model is written for one rank; a plan of eight lines and two transforms divide it.
//!
//! `cargo run -p ferrotitan-trainer --example recommender`
#![allow(clippy::print_stdout)]

use ferrotitan_comm::{BoxError, DeviceMesh, ReduceOp, threads};
use ferrotitan_ext::autograd;
use ferrotitan_fsdp::Fsdp;
use ferrotitan_mesh::rng::{Distribution, Stream};
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::{
    Attention, Batch, Embedding, Head, Layer, Linear, Materialize, Model, NamedLayer, Parameter, Plain, Projection,
    Result, RmsNorm, Sdpa, Seam, Transform,
};
use ferrotitan_optim::{AdamW, AdamWOptions};
use ferrotitan_tp::{Heads, Options, Plan, Style, TensorParallel};
use tch::{Device, Kind, Tensor};

const ITEMS: usize = 1000;
const DIM: usize = 32;
const HEADS: usize = 4;
const HISTORY: usize = 16;
const USERS: usize = 32;
const INIT: Distribution = Distribution::Normal { mean: 0.0, std: 0.1 };

fn linear(names: &[&str], inputs: usize, outputs: usize) -> Box<dyn Linear> {
    let projection = |name: &&str| Projection::new(name, inputs, outputs, INIT);
    Box::new(Plain::new(names.iter().map(projection).collect()))
}

fn weights(linear: &dyn Linear) -> impl Iterator<Item = Parameter> {
    linear.projections().iter().map(|projection| projection.weight.clone())
}

/// Adds a learned vector for each place in the history.
#[derive(Debug)]
struct Places(Parameter);

impl Layer for Places {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        Ok(x + Tensor::embedding(&self.0.value()?, &batch.positions, -1, false, false))
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.0.clone()]
    }
}

/// Attention over the items so far, then two projections item by item.
#[derive(Debug)]
struct Block {
    name: String,
    norms: [RmsNorm; 2],
    qkv: Box<dyn Linear>,
    attention: Box<dyn Attention>,
    out: Box<dyn Linear>,
    up: Box<dyn Linear>,
    down: Box<dyn Linear>,
}

impl Block {
    fn new(name: String) -> Self {
        let of = |part: &str| format!("{name}.{part}");
        Self {
            norms: ["attention_norm", "norm"].map(|norm| RmsNorm::new(&of(norm), DIM, 1e-5)),
            qkv: linear(&[&of("q"), &of("k"), &of("v")], DIM, DIM),
            attention: Box::new(Sdpa),
            out: linear(&[&of("out")], DIM, DIM),
            up: linear(&[&of("up")], DIM, DIM),
            down: linear(&[&of("down")], DIM, DIM),
            name,
        }
    }
}

impl Layer for Block {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        let qkv = self.qkv.forward(&self.norms[0].normalize(x)?)?;
        // As many heads as this rank's part of the projections holds.
        let heads = |x: &Tensor| x.view([x.size()[0], x.size()[1], -1, (DIM / HEADS) as i64]);
        let seen = self.attention.forward(&heads(&qkv[0]), &heads(&qkv[1]), &heads(&qkv[2]), batch)?;
        let x = x + self.out.forward(&seen.flatten(2, 3))?.remove(0);
        let hidden = self.up.forward(&self.norms[1].normalize(&x)?)?.remove(0).relu();
        Ok(&x + self.down.forward(&hidden)?.remove(0))
    }

    fn parameters(&self) -> Vec<Parameter> {
        let linears = [&self.qkv, &self.out, &self.up, &self.down];
        let norms = self.norms.iter().map(|norm| norm.weight().clone());
        linears.into_iter().flat_map(|linear| weights(&**linear)).chain(norms).collect()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        let name = |part: &str| format!("{}.{part}", self.name);
        vec![
            (name("qkv"), Seam::Linear(&mut self.qkv)),
            (name("attention"), Seam::Attention(&mut self.attention)),
            (name("out"), Seam::Linear(&mut self.out)),
            (name("up"), Seam::Linear(&mut self.up)),
            (name("down"), Seam::Linear(&mut self.down)),
        ]
    }
}

/// The model as one rank would have it. Items are scored by the table that they are looked up in.
fn model() -> Model {
    let items = Embedding::new("items", ITEMS, DIM, INIT);
    let mut score = Projection::new("score", DIM, ITEMS, INIT);
    score.weight = items.weight().clone();
    Model::new(vec![
        NamedLayer::new("items", items),
        NamedLayer::new("places", Places(Parameter::new("places.weight", &[HISTORY, DIM], INIT))),
        NamedLayer::new("blocks.0", Block::new("blocks.0".into())),
        NamedLayer::new("blocks.1", Block::new("blocks.1".into())),
        NamedLayer::new("norm", RmsNorm::new("norm", DIM, 1e-5)),
        NamedLayer::new("score", Head::new("score", Box::new(Plain::new(vec![score])))),
    ])
}

fn plan() -> Result<Plan, ferrotitan_tp::Error> {
    let heads = Heads { key_value: HEADS, size: DIM / HEADS };
    Plan::new([
        ("items.weight", Style::Vocabulary),
        ("places.weight", Style::Replicated),
        ("blocks.*.[qkv].weight", Style::ColumnByHeads(heads)),
        ("blocks.*.out.weight", Style::RowByHeads(heads)),
        ("blocks.*.up.weight", Style::Column),
        ("blocks.*.down.weight", Style::Row),
        ("blocks.*norm.weight", Style::Replicated),
        ("norm.weight", Style::Replicated),
    ])
}

/// What users number `users` looked at, and what each looked at next. Mostly an item leads to one other; sometimes a
/// user strays. A history depends on the user alone, so any mesh reads the same.
fn histories(users: std::ops::Range<usize>) -> Result<Batch> {
    let any = Distribution::Uniform { low: 0.0, high: 1.0 };
    let mut looked_at = Vec::new();
    for user in users.clone() {
        let chance = Stream::new(user as u64, "history");
        let stray = |index| (chance.sample(any, index) * ITEMS as f64) as i64;
        let mut item = stray(0);
        for step in 0..=HISTORY as u64 {
            looked_at.push(item);
            let strays = chance.sample(any, 2 * step + 1) < 0.1;
            item = if strays { stray(2 * step + 2) } else { (item / 8 * 8 + 8) % ITEMS as i64 };
        }
    }
    let histories = Tensor::from_slice(&looked_at).view([users.len() as i64, HISTORY as i64 + 1]);
    Batch::new(histories.narrow(1, 0, HISTORY as i64), Some(histories.narrow(1, 1, HISTORY as i64).contiguous()))
}

/// The loss of each step, and how many rows of the table this rank holds.
fn rank_main(mesh: &DeviceMesh, steps: usize) -> Result<(Vec<f64>, usize), BoxError> {
    let mut model = model();
    // `Places` adds a vector for every place of the sequence, so each rank has the whole sequence between the
    // projections.
    let options = Options { sequence_parallel: false, ..Options::default() };
    TensorParallel::new(mesh.clone(), options, plan()?).apply(&mut model, mesh)?;
    let sharded = Fsdp::new(mesh, ferrotitan_fsdp::Options::default()).attach(&mut model)?;
    model.materialize(&Materialize { seed: 7, kind: Kind::Double, compute: None, device: Device::Cpu }, mesh)?;
    let parameters = model.parameters();
    let rows = parameters[0].local()?.size()[0] as usize;

    let mut adamw = AdamW::new(parameters, AdamWOptions { lr: 3e-3, ..AdamWOptions::default() }, &[])?;
    let readers = mesh.group(View::BATCH)?;
    let own = USERS / readers.size();
    let mut losses = Vec::new();
    for step in 0..steps {
        let first = step * USERS + readers.rank() * own;
        let sum = model.forward(&histories(first..first + own)?)?;
        // A sum, divided once by the predictions of all ranks.
        let loss = sum / (USERS * HISTORY) as f64;
        autograd::backward(&[loss.shallow_clone()], &[], false)?;
        sharded.finish_backward()?;
        adamw.step(1.0)?;
        adamw.clear_gradients()?;
        losses.push(readers.all_reduce_scalar(loss.double_value(&[]), ReduceOp::Sum)?);
    }
    Ok((losses, rows))
}

/// The losses, and the rows of the table on each rank.
pub(crate) fn train(degrees: Degrees, steps: usize) -> Result<(Vec<f64>, Vec<usize>), BoxError> {
    let ranks = threads::run(degrees, &threads::Options::default(), |mesh| rank_main(&mesh, steps))?;
    let rows = ranks.iter().map(|rank| rank.1).collect();
    Ok((ranks.into_iter().next().ok_or("a mesh has a rank")?.0, rows))
}

fn main() -> Result<(), BoxError> {
    let steps = 60;
    let (alone, _) = train(Degrees::default(), steps)?;
    let (divided, rows) = train(Degrees { dp_shard: 2, tp: 2, ..Degrees::default() }, steps)?;
    println!("rows of the table of {ITEMS} items on each of four ranks: {rows:?}");
    println!("a guess costs {:.3}", (ITEMS as f64).ln());
    println!("mean loss of ten steps to   one rank   four ranks");
    for (index, (alone, divided)) in alone.chunks(10).zip(divided.chunks(10)).enumerate() {
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        println!("{:>25}   {:>8.4}   {:>10.4}", 10 * (index + 1), mean(alone), mean(divided));
    }
    Ok(())
}
