//! What a model is given: tokens, labels, and where each token stands.

use tch::Tensor;

use crate::{Error, Result};

/// The label of a token that has no loss.
pub const IGNORE_INDEX: i64 = -100;

/// One microbatch of sequences.
#[derive(Debug)]
pub struct Batch {
    /// Token ids, int64 `[batch, seq]`.
    pub tokens: Tensor,
    /// What each token should predict, int64 `[batch, seq]`, [`IGNORE_INDEX`] where nothing. Without labels the model
    /// returns logits, with them the sum of the losses.
    pub labels: Option<Tensor>,
    /// The position of each token for the rotary embedding, int64 `[batch, seq]`.
    pub positions: Tensor,
    /// Which tokens belong together, for attention that stays within documents.
    pub documents: Option<Documents>,
}

impl Batch {
    /// Sequences whose tokens stand at 0, 1, 2, …, each a single document.
    ///
    /// # Errors
    /// When `tokens` is not a matrix.
    pub fn new(tokens: Tensor, labels: Option<Tensor>) -> Result<Self> {
        let (batch, seq) = tokens.size2().map_err(|_| Error::Shape {
            module: "Batch",
            got: format!("tokens of shape {:?}", tokens.size()),
            expected: "[batch, seq]".into(),
        })?;
        let positions =
            Tensor::arange(seq, (tch::Kind::Int64, tokens.device())).unsqueeze(0).expand([batch, seq], false);
        Ok(Self { tokens, labels, positions, documents: None })
    }

    /// Another handle on the same tensors.
    #[must_use]
    pub fn shallow_clone(&self) -> Self {
        Self {
            tokens: self.tokens.shallow_clone(),
            labels: self.labels.as_ref().map(Tensor::shallow_clone),
            positions: self.positions.shallow_clone(),
            documents: self.documents.clone(),
        }
    }
}

/// The documents that the sequences of a batch consist of.
///
/// The lengths live on the host: attention cuts the sequences by them without waiting for a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents {
    lengths: Vec<Vec<i64>>,
}

impl Documents {
    /// From the lengths of each sequence's documents, in order.
    ///
    /// # Errors
    /// When a length is not positive, or the sequences differ in length.
    pub fn from_lengths(lengths: Vec<Vec<i64>>) -> Result<Self> {
        let total = |sequence: &Vec<i64>| sequence.iter().sum::<i64>();
        let seq = lengths.first().map_or(0, total);
        if lengths.iter().any(|sequence| total(sequence) != seq || sequence.iter().any(|&n| n <= 0)) {
            return Err(Error::Shape {
                module: "Documents",
                got: format!("{lengths:?}"),
                expected: "positive lengths with the same sum in every sequence".into(),
            });
        }
        Ok(Self { lengths })
    }

    /// From document ids, `seq` for each sequence; a document is a run of equal ids.
    ///
    /// # Errors
    /// When the ids are no whole number of sequences.
    pub fn from_ids(ids: &[i64], seq: usize) -> Result<Self> {
        if seq == 0 || !ids.len().is_multiple_of(seq) {
            return Err(Error::Shape {
                module: "Documents",
                got: format!("{} ids", ids.len()),
                expected: format!("a multiple of the sequence length {seq}"),
            });
        }
        let runs = |sequence: &[i64]| sequence.chunk_by(|a, b| a == b).map(|run| run.len() as i64).collect();
        Ok(Self { lengths: ids.chunks(seq).map(runs).collect() })
    }

    /// The lengths of each sequence's documents.
    #[must_use]
    pub fn lengths(&self) -> &[Vec<i64>] {
        &self.lengths
    }

    /// Whether every sequence is one document, so that no mask is needed beyond the causal one.
    #[must_use]
    pub fn is_trivial(&self) -> bool {
        self.lengths.iter().all(|sequence| sequence.len() == 1)
    }
}
