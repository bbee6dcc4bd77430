//! Which keys a query may see.

use std::ops::Range;

use ferrotitan_nn::Documents;

use crate::{Error, Result};

/// Which keys each query may see, as positions in the global sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    causal: bool,
    documents: Option<Documents>,
}

impl Mask {
    /// A query sees the keys up to its own position.
    #[must_use]
    pub fn causal() -> Self {
        Self { causal: true, documents: None }
    }

    /// A query sees every key.
    #[must_use]
    pub fn full() -> Self {
        Self { causal: false, documents: None }
    }

    /// The same within documents: a query sees the keys of its own document alone. One list of lengths for each sequence
    /// of the batch.
    #[must_use]
    pub fn within(self, documents: Documents) -> Self {
        Self { documents: Some(documents), ..self }
    }

    /// Whether a query sees the keys up to its own position alone.
    #[must_use]
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// The documents that a query stays within, if it does.
    #[must_use]
    pub fn documents(&self) -> Option<&Documents> {
        self.documents.as_ref()
    }

    /// The lengths of the documents of each kind of sequence in a batch, and how many sequences are of that kind, in the
    /// batch's order. Without documents, one kind: the whole sequence.
    pub(crate) fn rows(&self, batch: usize, seq: usize) -> Result<Vec<(usize, Vec<i64>)>> {
        let Some(documents) = &self.documents else {
            return Ok(if batch == 0 { vec![] } else { vec![(batch, vec![seq as i64])] });
        };
        let lengths = documents.lengths();
        if lengths.len() != batch || lengths.iter().any(|row| row.iter().sum::<i64>() != seq as i64) {
            let sums: Vec<i64> = lengths.iter().map(|row| row.iter().sum()).collect();
            return Err(Error::Shape {
                what: "mask",
                got: format!("documents of {} sequences with {sums:?} tokens", lengths.len()),
                expected: format!("documents of {batch} sequences with {seq} tokens each"),
            });
        }
        Ok(lengths.chunk_by(|a, b| a == b).map(|same| (same.len(), same[0].clone())).collect())
    }
}

/// Consecutive ranges of the given lengths.
pub(crate) fn consecutive(lengths: impl IntoIterator<Item = i64>) -> Vec<Range<i64>> {
    let mut start = 0;
    let next = |length| {
        let range = start..start + length;
        start = range.end;
        range
    };
    lengths.into_iter().map(next).collect()
}
