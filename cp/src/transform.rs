//! Context parallelism of a model.

use std::sync::{Arc, Mutex, PoisonError};

use ferrotitan_comm::{DeviceMesh, Group};
use ferrotitan_mesh::{Mesh, View};
use ferrotitan_nn::{Attention, Batch, Documents, IGNORE_INDEX, Model, Seam, Transform};
use tch::Tensor;

use crate::{Balance, Error, Mask, Method, Plan, Result, Sharding, planned_attention};

/// How the ranks of a context group share a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContextOptions {
    /// How queries meet the keys of other ranks.
    pub method: Method,
    /// How tokens are dealt out.
    pub balance: Balance,
}

/// Context parallelism: every rank of the mesh's `cp` dimension holds part of each sequence.
///
/// As a [`Transform`] it replaces every [`Attention`] seam, where the group has several ranks. The model is then given batches that
/// [`shard_batch`](Self::shard_batch) has cut, and its loss is the sum over this rank's tokens. Parameters know nothing of
/// it: their gradients are sums over this rank's tokens too, and are summed over `cp` as over data-parallel ranks
/// ([`View::LOSS`], and for shards [`View::FSDP`], span both).
#[derive(Debug, Clone)]
pub struct ContextParallel {
    group: Group,
    options: ContextOptions,
    /// That of the last batch, which all layers share.
    last: Arc<Mutex<Option<Known>>>,
}

#[derive(Debug)]
struct Known {
    documents: Documents,
    plan: Arc<Plan>,
}

impl ContextParallel {
    /// Over the `cp` dimension of a mesh.
    ///
    /// # Errors
    /// [`Error::Comm`], where the group has to be joined first.
    pub fn new(mesh: &DeviceMesh, options: ContextOptions) -> Result<Self> {
        Ok(Self { group: mesh.group(View::CP)?, options, last: Arc::default() })
    }

    /// How a batch of sequences with these documents is dealt out.
    ///
    /// # Errors
    /// [`Error::Sharding`].
    pub fn sharding(&self, documents: &Documents) -> Result<Sharding> {
        Ok(self.plan(documents)?.sharding.clone())
    }

    /// This rank's part of a batch: tokens, labels and positions, all cut alike.
    ///
    /// The documents stay those of the whole sequences; a batch without any gets one a sequence. Where a rank would have no
    /// token, it gets one without a label.
    ///
    /// # Errors
    /// [`Error::Shape`] when tokens, labels, positions and documents do not fit each other.
    pub fn shard_batch(&self, batch: &Batch) -> Result<Batch> {
        let documents = documents(batch)?;
        let sharding = self.sharding(&documents)?;
        let cut = |x: &Tensor, padding| {
            if x.size() != batch.tokens.size() {
                return Err(unfit(format!("tensors of shapes {:?} and {:?}", batch.tokens.size(), x.size())));
            }
            sharding.shard(x, 1, self.group.rank(), padding)
        };
        Ok(Batch {
            tokens: cut(&batch.tokens, 0)?,
            labels: batch.labels.as_ref().map(|labels| cut(labels, IGNORE_INDEX)).transpose()?,
            positions: cut(&batch.positions, 0)?,
            documents: Some(documents),
        })
    }

    /// Gathers what the ranks have computed for the tokens of a batch that [`shard_batch`](Self::shard_batch) gave (logits,
    /// say, with the tokens along `axis`) in the order of the sequence. The same on all ranks, without gradient.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Comm`].
    pub fn gather(&self, x: &Tensor, axis: usize, batch: &Batch) -> Result<Tensor> {
        self.sharding(&documents(batch)?)?.gather(x, axis, &self.group)
    }

    /// The number of query-key pairs of each rank for a batch of sequences with these documents, for each head; of
    /// [`Method::AllToAll`], that of the whole sequence.
    ///
    /// # Errors
    /// [`Error::Sharding`].
    pub fn work(&self, documents: &Documents) -> Result<Vec<u64>> {
        let sharding = self.sharding(documents)?;
        let mask = Mask::causal().within(documents.clone());
        let batch = documents.lengths().len();
        let of = |rank| Ok(Plan::new(&mask, &sharding, self.options.method, rank, batch)?.pairs());
        (0..self.group.size()).map(of).collect()
    }

    fn plan(&self, documents: &Documents) -> Result<Arc<Plan>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = last.as_ref().filter(|known| known.documents == *documents) {
            return Ok(known.plan.clone());
        }
        let mask = Mask::causal().within(documents.clone());
        let batch = documents.lengths().len();
        let seq = documents.lengths().first().map_or(0, |row| row.iter().sum::<i64>()) as usize;
        let sharding = self.options.balance.sharding(&mask, batch, seq, self.group.size())?;
        let plan = Arc::new(Plan::new(&mask, &sharding, self.options.method, self.group.rank(), batch)?);
        *last = Some(Known { documents: documents.clone(), plan: plan.clone() });
        Ok(plan)
    }
}

impl Transform for ContextParallel {
    fn apply(&self, model: &mut Model, _mesh: &dyn Mesh) -> ferrotitan_nn::Result<()> {
        // A rank alone has nobody to share with, and the model's own attention is as fast as it gets.
        if self.group.size() == 1 {
            return Ok(());
        }
        for (_, seam) in model.seams() {
            if let Seam::Attention(attention) = seam {
                *attention = Box::new(self.clone());
            }
        }
        Ok(())
    }
}

impl Attention for ContextParallel {
    fn forward(&mut self, q: &Tensor, k: &Tensor, v: &Tensor, batch: &Batch) -> ferrotitan_nn::Result<Tensor> {
        let attend = || {
            let Some(documents) = &batch.documents else {
                return Err(unfit("a batch that was not cut; give the model what `shard_batch` gives".into()));
            };
            planned_attention(q, k, v, &self.plan(documents)?, &self.group)
        };
        let context = || format!("context parallel attention ({})", self.options.method);
        attend().map_err(|source| ferrotitan_nn::Error::Other { context: context(), source: source.into() })
    }
}

/// The documents of a batch of whole sequences: its own, or one a sequence.
fn documents(batch: &Batch) -> Result<Documents> {
    if let Some(documents) = &batch.documents {
        return Ok(documents.clone());
    }
    let (rows, seq) = batch.tokens.size2().map_err(|_| unfit(format!("tokens {:?}", batch.tokens.size())))?;
    let one = || Documents::from_lengths(vec![vec![seq]; rows as usize]);
    one().map_err(|error| unfit(error.to_string()))
}

fn unfit(got: String) -> Error {
    Error::Shape {
        what: "batch",
        got,
        expected: "tokens, labels and positions of one shape [batch, seq], and documents that fill it".into(),
    }
}
