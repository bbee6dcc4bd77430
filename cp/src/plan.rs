//! What one rank computes for one batch, worked out on the host before any tensor is touched.

use std::iter::once;
use std::ops::Range;

use crate::blocks::{Block, blocks};
use crate::mask::consecutive;
use crate::{Error, Mask, Method, Result, Sharding};

/// What one rank computes, and with whom it exchanges what.
///
/// It depends on the mask, the sharding and the method alone: a model makes one a batch, and all its layers use it.
#[derive(Debug, Clone)]
pub struct Plan {
    pub(crate) sharding: Sharding,
    pub(crate) method: Method,
    pub(crate) rank: usize,
    batch: usize,
    rows: Vec<Rows>,
}

/// Consecutive sequences of the batch that have the same documents.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    pub(crate) rows: Range<i64>,
    /// By the source of the keys: their rank, or of [`Method::AllToAll`] the whole sequence alone.
    sources: Vec<Vec<Block>>,
}

impl Plan {
    /// Of rank `rank`, for a batch of `batch` sequences.
    ///
    /// # Errors
    /// [`Error::Shape`] when the mask's documents do not fill the batch, or there is no such rank.
    pub fn new(mask: &Mask, sharding: &Sharding, method: Method, rank: usize, batch: usize) -> Result<Self> {
        if rank >= sharding.ranks() {
            return Err(Error::Shape {
                what: "plan",
                got: format!("rank {rank}"),
                expected: format!("one of {} ranks", sharding.ranks()),
            });
        }
        let (seq, padded, causal) = (sharding.seq(), sharding.padded(), mask.is_causal());
        let padding = padded - seq as i64;
        let mut row = 0;
        let rows = mask.rows(batch, seq)?.into_iter().map(|(count, lengths)| {
            // Padding is a document of its own, so that nothing sees it.
            let documents = consecutive(lengths.into_iter().chain((padding > 0).then_some(padding)));
            let rows = row..row + count as i64;
            row = rows.end;
            let sources = match method {
                Method::AllToAll => {
                    let whole = once(0..padded).collect::<Vec<_>>();
                    vec![blocks(&whole, &whole, &documents, causal, true)]
                }
                Method::Ring | Method::AllGather => {
                    let own = sharding.ranges(rank);
                    let of = |source| blocks(own, sharding.ranges(source), &documents, causal, source == rank);
                    (0..sharding.ranks()).map(of).collect()
                }
            };
            Rows { rows, sources }
        });
        Ok(Self { rows: rows.collect(), sharding: sharding.clone(), method, rank, batch })
    }

    /// How many pairs of a query and a key this rank computes, over all sequences of the batch, for each head that it
    /// computes.
    #[must_use]
    pub fn pairs(&self) -> u64 {
        let of = |rows: &Rows| rows.sources.iter().flatten().map(Block::pairs).sum::<u64>();
        self.rows.iter().map(|rows| (rows.rows.end - rows.rows.start) as u64 * of(rows)).sum()
    }

    /// The blocks whose keys come from `source`, with the rows of the batch that they are of.
    pub(crate) fn blocks(&self, source: usize) -> impl Iterator<Item = (&Range<i64>, &Block)> {
        self.rows.iter().flat_map(move |rows| rows.sources[source].iter().map(|block| (&rows.rows, block)))
    }

    /// Checks that queries and keys are what this plan was made for.
    pub(crate) fn check(&self, q: &[i64], k: &[i64], v: &[i64]) -> Result<()> {
        let length = self.sharding.lengths()[self.rank] as i64;
        let fits = |x: &[i64]| matches!(x, [b, s, _, _] if (*b, *s) == (self.batch as i64, length));
        let grouped = |h: i64, g: i64| g > 0 && h % g == 0;
        if fits(q) && fits(k) && k == v && q[3] == k[3] && grouped(q[2], k[2]) {
            return Ok(());
        }
        let batch = self.batch;
        Err(Error::Shape {
            what: "attention",
            got: format!("queries {q:?}, keys {k:?}, values {v:?}"),
            expected: format!(
                "[{batch}, {length}, heads, features] on rank {}, the heads of the queries a multiple of those of the keys",
                self.rank
            ),
        })
    }
}
