//! Is a sentence true of a pair of images? A classifier of one's own, over records in the form of the NLVR2 data set
//! (Suhr et al. 2019, <https://arxiv.org/abs/1811.00491>): a line of JSON for each sentence, with the addresses of two
//! images and a label. The images are drawn here: a coloured shape in each.
//!
//! Words and image patches stand in one sequence, which an encoder reads in both directions. The two ranks of
//! `dp_shard` see different records and divide the parameters, the two of `tp` divide heads and projections.
//!
//! `cargo run -p ferrotitan-trainer --example sentence_about_images`
#![allow(clippy::print_stdout)]

use std::collections::HashMap;

use ferrotitan_comm::{BoxError, DeviceMesh, ReduceOp, threads};
use ferrotitan_ext::autograd;
use ferrotitan_fsdp::Fsdp;
use ferrotitan_mesh::rng::{Distribution, Stream};
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::{
    Attention, Batch, FeedForward, Layer, Linear, Materialize, Model, NamedLayer, Parameter, Plain, Projection, Result,
    RmsNorm, Seam, Transform,
};
use ferrotitan_optim::{AdamW, AdamWOptions};
use ferrotitan_tp::{Heads, Options, Plan, Style, TensorParallel};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Reduction, Tensor};

const RECORDS: usize = 32;
const DIM: usize = 32;
const HEADS: usize = 4;
/// An image is of 3 by 3 patches of 4 by 4 points of 3 colours.
const PATCHES: usize = 9;
const PATCH: usize = 48;
/// Words of the longest sentence.
const SENTENCE: usize = 6;
const INIT: Distribution = Distribution::Normal { mean: 0.0, std: 0.1 };
const WORDS: [&str; 9] = ["the", "left", "right", "image", "is", "red", "green", "blue", "not"];

/// A line of an NLVR2 file: the fields that a classifier needs. Others are passed over.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Split, set, pair and sentence: `train-12-0-1`.
    identifier: String,
    sentence: String,
    left_url: String,
    right_url: String,
    /// `True` or `False`.
    label: String,
}

/// Records number `range` as lines of JSON, and the images that stand behind their addresses. Each depends on its
/// number alone, so any mesh reads the same.
fn records(range: std::ops::Range<usize>) -> Result<(String, HashMap<String, Tensor>), BoxError> {
    let (mut lines, mut images) = (String::new(), HashMap::new());
    for number in range {
        let chance = Stream::new(number as u64, "record");
        let any = |index, of: usize| chance.sample(Distribution::Uniform { low: 0.0, high: of as f64 }, index) as usize;
        let urls = [0, 1].map(|image| format!("https://images.example/train-{number}-0-img{image}.png"));
        let colours = [any(0, 3), any(1, 3)];
        for (side, url) in urls.iter().enumerate() {
            let image = Tensor::zeros([12, 12, 3], (Kind::Double, Device::Cpu));
            let offset = 10 * side as u64;
            let place = |index| any(offset + index, 8) as i64;
            // A square or an upright bar, somewhere.
            let width = if any(offset + 2, 2) == 0 { 5 } else { 2 };
            let shape = image.narrow(0, place(3), 5).narrow(1, place(4), width);
            let _ = shape.select(2, colours[side] as i64).fill_(1.0);
            images.insert(url.clone(), image);
        }
        let (side, colour, negated) = (any(30, 2), any(31, 3), any(32, 2) == 1);
        // As often true as false.
        let colour = if any(33, 2) == 0 { colours[side] } else { colour };
        let not = if negated { " not" } else { "" };
        let [left_url, right_url] = urls;
        let record = Record {
            identifier: format!("train-{number}-0-0"),
            sentence: format!("The {} image is{not} {}.", WORDS[1 + side], WORDS[5 + colour]),
            left_url,
            right_url,
            label: if (colours[side] == colour) != negated { "True" } else { "False" }.into(),
        };
        lines += &serde_json::to_string(&record)?;
        lines.push('\n');
    }
    Ok((lines, images))
}

/// What the model reads of those lines: the patches of both images `[records, 2 * PATCHES, PATCH]`, and a batch of the
/// sentences' words, with a label a sentence.
fn read(lines: &str, images: &HashMap<String, Tensor>) -> Result<(Tensor, Batch), BoxError> {
    let (mut patches, mut words, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    for line in lines.lines() {
        let record: Record = serde_json::from_str(line)?;
        for url in [&record.left_url, &record.right_url] {
            let image = images.get(url).ok_or_else(|| format!("{}: no image at {url}", record.identifier))?;
            patches.push(image.reshape([3, 4, 3, 4, 3]).transpose(1, 2).reshape([PATCHES as i64, PATCH as i64]));
        }
        let sentence = record.sentence.trim_end_matches('.').to_lowercase();
        let known = |word| WORDS.iter().position(|known| *known == word);
        let mut ids = sentence.split(' ').map(known).collect::<Option<Vec<_>>>().ok_or("an unknown word")?;
        // The last number stands for no word.
        ids.resize(SENTENCE, WORDS.len());
        words.extend(ids.iter().map(|&id| id as i64));
        labels.push(i64::from(record.label == "True"));
    }
    let count = labels.len() as i64;
    let places = Tensor::arange((SENTENCE + 2 * PATCHES) as i64, (Kind::Int64, Device::Cpu));
    let batch = Batch {
        tokens: Tensor::from_slice(&words).view([count, SENTENCE as i64]),
        labels: Some(Tensor::from_slice(&labels)),
        positions: places.expand([count, places.size()[0]], false),
        documents: None,
    };
    Ok((Tensor::stack(&patches, 0).view([count, 2 * PATCHES as i64, PATCH as i64]), batch))
}

fn linear(names: &[&str], inputs: usize, outputs: usize) -> Box<dyn Linear> {
    let projection = |name: &&str| Projection::new(name, inputs, outputs, INIT);
    Box::new(Plain::new(names.iter().map(projection).collect()))
}

fn weights(linear: &dyn Linear) -> impl Iterator<Item = Parameter> {
    linear.projections().iter().map(|projection| projection.weight.clone())
}

/// Words and patches become one sequence of vectors. It is given the patches, and finds the words in the batch.
#[derive(Debug)]
struct Inputs {
    words: Parameter,
    places: Parameter,
    patches: Projection,
}

impl Layer for Inputs {
    fn forward(&mut self, patches: &Tensor, batch: &Batch) -> Result<Tensor> {
        let words = Tensor::embedding(&self.words.value()?, &batch.tokens, -1, false, false);
        let places = Tensor::embedding(&self.places.value()?, &batch.positions, -1, false, false);
        Ok(Tensor::cat(&[words, self.patches.forward(patches)?], 1) + places)
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.words.clone(), self.places.clone(), self.patches.weight.clone()]
    }
}

/// Attention in both directions: everything sees everything.
#[derive(Debug)]
struct BothWays;

impl Attention for BothWays {
    fn forward(&mut self, q: &Tensor, k: &Tensor, v: &Tensor, _batch: &Batch) -> Result<Tensor> {
        let [q, k, v] = [q, k, v].map(|x| x.transpose(1, 2));
        let out = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, false, None, false);
        Ok(out.transpose(1, 2))
    }
}

/// An encoder's block.
#[derive(Debug)]
struct Block {
    name: String,
    norms: [RmsNorm; 2],
    qkv: Box<dyn Linear>,
    attention: Box<dyn Attention>,
    out: Box<dyn Linear>,
    feed_forward: FeedForward,
}

impl Block {
    fn new(name: String) -> Self {
        let of = |part: &str| format!("{name}.{part}");
        let feed_forward = FeedForward::new(
            &of("feed_forward"),
            linear(&[&of("gate"), &of("up")], DIM, 2 * DIM),
            linear(&[&of("down")], 2 * DIM, DIM),
        );
        Self {
            norms: ["attention_norm", "norm"].map(|norm| RmsNorm::new(&of(norm), DIM, 1e-5)),
            qkv: linear(&[&of("q"), &of("k"), &of("v")], DIM, DIM),
            attention: Box::new(BothWays),
            out: linear(&[&of("out")], DIM, DIM),
            feed_forward,
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
        Ok(&x + self.feed_forward.forward(&self.norms[1].normalize(&x)?)?)
    }

    fn parameters(&self) -> Vec<Parameter> {
        let norms = self.norms.iter().map(|norm| norm.weight().clone());
        weights(&*self.qkv).chain(weights(&*self.out)).chain(self.feed_forward.parameters()).chain(norms).collect()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        let mut seams = vec![
            (format!("{}.qkv", self.name), Seam::Linear(&mut self.qkv)),
            (format!("{}.attention", self.name), Seam::Attention(&mut self.attention)),
            (format!("{}.out", self.name), Seam::Linear(&mut self.out)),
        ];
        seams.extend(self.feed_forward.seams());
        seams
    }
}

/// Says by the first word's vector whether the sentence is true: the sum of the losses where the batch has labels, else
/// the logits.
#[derive(Debug)]
struct Verdict {
    norm: RmsNorm,
    verdict: Projection,
}

impl Layer for Verdict {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        let logits = self.verdict.forward(&self.norm.normalize(&x.select(1, 0))?)?;
        Ok(match &batch.labels {
            Some(labels) => logits.cross_entropy_loss(labels, None::<&Tensor>, Reduction::Sum, -100, 0.0),
            None => logits,
        })
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.norm.weight().clone(), self.verdict.weight.clone()]
    }
}

/// The model as one rank would have it.
fn model() -> Model {
    let table = |name: &str, rows| Parameter::new(name, &[rows, DIM], INIT);
    let inputs = Inputs {
        words: table("inputs.words", WORDS.len() + 1),
        places: table("inputs.places", SENTENCE + 2 * PATCHES),
        patches: Projection::new("inputs.patches", PATCH, DIM, INIT),
    };
    let verdict = Projection::new("verdict.out", DIM, 2, INIT);
    let verdict = Verdict { norm: RmsNorm::new("verdict.norm", DIM, 1e-5), verdict };
    Model::new(vec![
        NamedLayer::new("inputs", inputs),
        NamedLayer::new("blocks.0", Block::new("blocks.0".into())),
        NamedLayer::new("blocks.1", Block::new("blocks.1".into())),
        NamedLayer::new("verdict", verdict),
    ])
}

fn plan() -> Result<Plan, ferrotitan_tp::Error> {
    let heads = Heads { key_value: HEADS, size: DIM / HEADS };
    Plan::new([
        ("{inputs,verdict}.*", Style::Replicated),
        ("blocks.*.[qkv].weight", Style::ColumnByHeads(heads)),
        ("blocks.*.out.weight", Style::RowByHeads(heads)),
        ("blocks.*.{gate,up}.weight", Style::Column),
        ("blocks.*.down.weight", Style::Row),
        ("blocks.*norm.weight", Style::Replicated),
    ])
}

/// The loss of each step, and which part of the verdicts on new records is right.
fn rank_main(mesh: &DeviceMesh, steps: usize) -> Result<(Vec<f64>, f64), BoxError> {
    let mut model = model();
    // The layers around the blocks work on whole sequences.
    let options = Options { sequence_parallel: false, ..Options::default() };
    TensorParallel::new(mesh.clone(), options, plan()?).apply(&mut model, mesh)?;
    let sharded = Fsdp::new(mesh, ferrotitan_fsdp::Options::default()).attach(&mut model)?;
    model.materialize(&Materialize { seed: 7, kind: Kind::Double, compute: None, device: Device::Cpu }, mesh)?;

    let options = AdamWOptions { lr: 3e-3, weight_decay: 0.01, ..AdamWOptions::default() };
    let mut adamw = AdamW::new(model.parameters(), options, &[])?;
    let readers = mesh.group(View::BATCH)?;
    let own = RECORDS / readers.size();
    let batch = |step| {
        let first = step * RECORDS + readers.rank() * own;
        let (lines, images) = records(first..first + own)?;
        read(&lines, &images)
    };
    let mut losses = Vec::new();
    for step in 0..steps {
        let (patches, batch) = batch(step)?;
        // A sum, divided once by the records of all ranks.
        let loss = model.forward_from(&patches, &batch)? / RECORDS as f64;
        autograd::backward(&[loss.shallow_clone()], &[], false)?;
        sharded.finish_backward()?;
        adamw.step(1.0)?;
        adamw.clear_gradients()?;
        losses.push(readers.all_reduce_scalar(loss.double_value(&[]), ReduceOp::Sum)?);
    }
    let mut right = 0.0;
    for step in steps..steps + 8 {
        let (patches, mut batch) = batch(step)?;
        let labels = batch.labels.take().ok_or("records have labels")?;
        let logits = tch::no_grad(|| model.forward_from(&patches, &batch))?;
        right += logits.argmax(-1, false).eq_tensor(&labels).sum(Kind::Double).double_value(&[]);
    }
    Ok((losses, readers.all_reduce_scalar(right, ReduceOp::Sum)? / (8 * RECORDS) as f64))
}

/// The losses, and which part of the verdicts on new records is right.
pub(crate) fn train(degrees: Degrees, steps: usize) -> Result<(Vec<f64>, f64), BoxError> {
    let ranks = threads::run(degrees, &threads::Options::default(), |mesh| rank_main(&mesh, steps))?;
    Ok(ranks.into_iter().next().ok_or("a mesh has a rank")?)
}

fn main() -> Result<(), BoxError> {
    let steps = 200;
    println!("{}", records(0..1)?.0.trim_end());
    let (alone, _) = train(Degrees::default(), steps)?;
    let (divided, right) = train(Degrees { dp_shard: 2, tp: 2, ..Degrees::default() }, steps)?;
    println!("a guess costs {:.3}", 2_f64.ln());
    println!("mean loss of 25 steps to   one rank   four ranks");
    for (index, (alone, divided)) in alone.chunks(25).zip(divided.chunks(25)).enumerate() {
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        println!("{:>24}   {:>8.4}   {:>10.4}", 25 * (index + 1), mean(alone), mean(divided));
    }
    println!("right on records that it has not seen: {:.0} %", 100.0 * right);
    Ok(())
}
