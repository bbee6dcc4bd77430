//! A small Llama, on one rank and as a pipeline.

use std::collections::{BTreeMap, BTreeSet};

use ferrotitan_mesh::{Grid, Region};
use ferrotitan_pp::comm::{BoxError, DeviceMesh};
use ferrotitan_pp::nn::llama::{LlamaConfig, build};
use ferrotitan_pp::nn::{
    ActivationCheckpoint, Batch, ChunkedCrossEntropy, Documents, IGNORE_INDEX, Materialize, Model, Parameter, Seam,
};
use ferrotitan_pp::schedule::{Algorithm, Lowered, LoweringOptions, Schedule, lower};
use ferrotitan_pp::{Activations, Partition, Pipeline, Split};
use tch::{Device, Kind, Tensor};

pub(crate) const DIM: i64 = 16;
pub(crate) const SEQ: i64 = 6;
const WORDS: i64 = 19;

/// In double precision.
pub(crate) const HOW: Materialize = Materialize { seed: 5, kind: Kind::Double, compute: None, device: Device::Cpu };

/// What is run.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) algorithm: Algorithm,
    pub(crate) ranks: usize,
    pub(crate) stages_per_rank: usize,
    pub(crate) microbatches: usize,
    /// Sequences of a microbatch.
    pub(crate) rows: usize,
    pub(crate) tied: bool,
    /// Whether the loss works on a few tokens at a time, with their gradients.
    pub(crate) chunked: bool,
    /// Whether blocks are computed again in the backward pass.
    pub(crate) checkpoint: bool,
}

impl Case {
    pub(crate) fn new(algorithm: Algorithm, ranks: usize, stages_per_rank: usize, microbatches: usize) -> Self {
        let (rows, tied, chunked, checkpoint) = (1, false, false, false);
        Self { algorithm, ranks, stages_per_rank, microbatches, rows, tied, chunked, checkpoint }
    }

    pub(crate) fn schedule(&self) -> Schedule {
        self.algorithm.generate(self.ranks, self.stages_per_rank, self.microbatches).unwrap()
    }

    pub(crate) fn plan(&self) -> Lowered {
        lower(&self.schedule(), &LoweringOptions { unshard: true, ..LoweringOptions::default() }).unwrap()
    }

    pub(crate) fn config(&self) -> LlamaConfig {
        LlamaConfig {
            dim: DIM as usize,
            // One block more than there must be, so that stages differ.
            n_layers: (self.ranks * self.stages_per_rank).saturating_sub(1).max(2),
            n_heads: 4,
            n_kv_heads: 2,
            hidden_dim: 22,
            tied_embeddings: self.tied,
            ..LlamaConfig::flavor("debugmodel", WORDS as usize).unwrap()
        }
    }

    /// Without storage.
    pub(crate) fn model(&self) -> Model {
        let mut model = build(&self.config()).unwrap();
        if self.chunked {
            for (_, seam) in model.seams() {
                if let Seam::Loss(loss) = seam {
                    *loss = Box::new(ChunkedCrossEntropy { logits: 2 * WORDS as usize });
                }
            }
        }
        if self.checkpoint {
            for named in model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers.")) {
                named.wrap(|layer| Box::new(ActivationCheckpoint::new(layer)));
            }
        }
        model
    }

    /// The batch of all ranks; some tokens have no label, some sequences two documents.
    pub(crate) fn batch(&self) -> Batch {
        let rows = (self.microbatches * self.rows) as i64;
        let all = Tensor::arange(rows * SEQ, (Kind::Int64, Device::Cpu)).view([rows, SEQ]);
        let tokens = (&all * 13 + 5).remainder(WORDS);
        let labels = (&all * 7 + 1).remainder(WORDS).masked_fill(&all.remainder(5).eq(2), IGNORE_INDEX);
        let mut batch = Batch::new(tokens, Some(labels)).unwrap();
        let lengths = (0..rows).map(|row| if row % 2 == 0 { vec![SEQ] } else { vec![2, SEQ - 2] });
        batch.documents = Some(Documents::from_lengths(lengths.collect()).unwrap());
        batch
    }

    /// The labels that count.
    pub(crate) fn tokens(&self) -> f64 {
        self.batch().labels.unwrap().ne(IGNORE_INDEX).sum(Kind::Double).double_value(&[])
    }

    /// On one rank, without any of this crate.
    pub(crate) fn alone(&self) -> Outcome {
        let mut model = self.model();
        model.materialize(&HOW, &Grid::single()).unwrap();
        let loss = model.forward(&self.batch()).unwrap();
        (&loss / self.tokens()).backward();
        let gradients = model.parameters().into_iter().map(|p| (p.name().to_owned(), p.gradient().unwrap().unwrap()));
        Outcome { loss: loss.double_value(&[]), gradients: gradients.collect() }
    }

    /// A pipeline on one rank, of a model that nothing else is done to.
    pub(crate) fn pipeline(&self, mesh: &DeviceMesh) -> Result<Pipeline, BoxError> {
        let mut model = self.model();
        let partition = Partition::of(&model, &Split::default(), &self.schedule())?;
        partition.keep(&mut model, mesh)?;
        model.materialize(&HOW, mesh)?;
        Ok(Pipeline::new(mesh, partition.stages(model), self.plan(), Activations::new(DIM, Kind::Double))?)
    }
}

/// What came of a step.
pub(crate) struct Outcome {
    /// The sum over all labels.
    pub(crate) loss: f64,
    pub(crate) gradients: BTreeMap<String, Tensor>,
}

/// What came of it on one rank.
pub(crate) struct Share {
    pub(crate) loss: f64,
    pub(crate) gradients: Vec<(String, Vec<usize>, Region, Tensor)>,
}

impl Share {
    pub(crate) fn new(loss: &Tensor, pipeline: &Pipeline, mesh: &DeviceMesh) -> Self {
        let part = |parameter: &Parameter| {
            let (layout, gradient) = (parameter.layout(), parameter.gradient().unwrap());
            let gradient = gradient.unwrap_or_else(|| panic!("{} has no gradient", parameter.name()));
            (parameter.name().to_owned(), layout.shape().to_vec(), layout.local_region(mesh), gradient)
        };
        let gradients = pipeline.parameters().iter().map(part).collect();
        Self { loss: loss.double_value(&[]), gradients }
    }
}

/// Every rank's part of every gradient is that of the expected one, and all of it is there. `copies` ranks give each
/// microbatch's loss.
pub(crate) fn assert_same(found: &[Share], expected: &Outcome, copies: f64, what: &str) {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-10 * b.abs();
    let loss: f64 = found.iter().map(|share| share.loss).sum::<f64>() / copies;
    assert!(near(loss, expected.loss), "{what}: loss {loss}, not {}", expected.loss);
    let mut covered: BTreeMap<&str, Tensor> = BTreeMap::new();
    for (name, shape, region, gradient) in found.iter().flat_map(|share| &share.gradients) {
        let whole = &expected.gradients[name];
        let narrow = |tensor: &Tensor| {
            let ranges = region.ranges().enumerate();
            ranges.fold(tensor.shallow_clone(), |tensor, (axis, range)| {
                tensor.narrow(axis as i64, range.start as i64, range.len() as i64)
            })
        };
        let scale = whole.abs().max().double_value(&[]);
        if gradient.numel() > 0 {
            let difference = (gradient - narrow(whole)).abs().max().double_value(&[]);
            assert!(difference <= 1e-10 * scale, "{what}: {name} is off by {difference} of {scale}");
        }
        let shape: Vec<i64> = shape.iter().map(|&length| length as i64).collect();
        let seen = covered.entry(name).or_insert_with(|| Tensor::zeros(&shape, (Kind::Bool, Device::Cpu)));
        let _ = narrow(seen).fill_(1);
    }
    let all: BTreeSet<&str> = expected.gradients.keys().map(String::as_str).collect();
    assert_eq!(covered.keys().copied().collect::<BTreeSet<_>>(), all, "{what}");
    assert!(covered.values().all(|seen| seen.all().int64_value(&[]) == 1), "{what}: part of a gradient is nowhere");
}
