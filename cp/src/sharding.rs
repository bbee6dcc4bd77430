//! How a sequence is dealt out to the ranks that share it.

use std::ops::Range;

use ferrotitan_comm::Group;
use tch::Tensor;

use crate::error::Context as _;
use crate::{Error, Result};

/// Which tokens of the global sequence each rank holds.
///
/// A rank holds one or several ranges of consecutive tokens, in ascending order, one after the other. Ranks may hold
/// different numbers of tokens, but each holds at least one: where a sequence is too short for that, the ranks that would
/// have none hold one token of padding, which stands behind the end of the sequence and which no other token sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sharding {
    seq: i64,
    /// By rank. Together they are `0..padded`.
    ranges: Vec<Vec<Range<i64>>>,
}

impl Sharding {
    /// Of a sequence of `seq` tokens, one list of ranges a rank.
    ///
    /// # Errors
    /// [`Error::Sharding`] when a rank's ranges do not ascend, or all ranks' together do not cover each token once.
    pub fn new(seq: usize, ranges: Vec<Vec<Range<usize>>>) -> Result<Self> {
        let fault = |reason: String| Error::Sharding { seq, reason };
        if ranges.is_empty() {
            return Err(fault("there is no rank; give one list of ranges a rank".into()));
        }
        for (rank, own) in ranges.iter().enumerate() {
            if own.windows(2).any(|pair| pair[0].end > pair[1].start) || own.iter().any(|range| range.start > range.end)
            {
                return Err(fault(format!("the ranges {own:?} of rank {rank} do not ascend")));
            }
        }
        let mut all: Vec<_> = ranges.iter().flatten().filter(|range| !range.is_empty()).cloned().collect();
        all.sort_by_key(|range| range.start);
        let mut covered = 0;
        for range in all {
            if range.start != covered {
                let reason = format!("token {} is held by no rank, or by two", covered.min(range.start));
                return Err(fault(reason));
            }
            covered = range.end;
        }
        if covered != seq {
            return Err(fault(format!("the ranges cover {covered} tokens")));
        }
        let mut padded = seq as i64;
        let ranges = ranges.into_iter().map(|own| {
            let mut joined: Vec<Range<i64>> = Vec::new();
            for range in own.into_iter().filter(|range| !range.is_empty()) {
                let (start, end) = (range.start as i64, range.end as i64);
                match joined.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => joined.push(start..end),
                }
            }
            if joined.is_empty() {
                joined.push(padded..padded + 1);
                padded += 1;
            }
            joined
        });
        Ok(Self { ranges: ranges.collect(), seq: seq as i64 })
    }

    /// One range a rank, of lengths that differ by one at most.
    ///
    /// # Errors
    /// [`Error::Sharding`] without ranks.
    pub fn contiguous(seq: usize, ranks: usize) -> Result<Self> {
        Self::new(seq, chunks(seq, ranks).map(|chunk| vec![chunk]).collect())
    }

    /// Two chunks of 2 · `ranks` a rank: rank `i` holds chunk `i` and the `i`th from the end, so that all ranks have
    /// equally many pairs of a query and a key that causal attention computes (Llama 3, <https://arxiv.org/abs/2407.21783>,
    /// section 3.3.2). Chunks differ in length by one at most.
    ///
    /// # Errors
    /// [`Error::Sharding`] without ranks.
    pub fn head_tail(seq: usize, ranks: usize) -> Result<Self> {
        let chunks: Vec<_> = chunks(seq, 2 * ranks).collect();
        Self::new(seq, (0..ranks).map(|i| vec![chunks[i].clone(), chunks[2 * ranks - 1 - i].clone()]).collect())
    }

    /// Number of tokens of the global sequence, without padding.
    #[must_use]
    pub fn seq(&self) -> usize {
        self.seq as usize
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranges.len()
    }

    /// The ranges of a rank, in ascending order. Tokens from [`seq`](Self::seq) on are padding.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn ranges(&self, rank: usize) -> &[Range<i64>] {
        &self.ranges[rank]
    }

    /// How many tokens each rank holds, padding included.
    #[must_use]
    pub fn lengths(&self) -> Vec<usize> {
        self.ranges.iter().map(|own| own.iter().map(|range| range.end - range.start).sum::<i64>() as usize).collect()
    }

    /// Number of tokens that all ranks hold together: those of the sequence and those of padding.
    pub(crate) fn padded(&self) -> i64 {
        self.ranges.iter().flatten().map(|range| range.end).max().unwrap_or(self.seq)
    }

    /// A rank's part of a tensor that is as long as the sequence along `axis`; `padding` where the rank holds padding.
    /// Differentiable.
    ///
    /// # Errors
    /// [`Error::Shape`] when the tensor has another length.
    pub fn shard(&self, x: &Tensor, axis: usize, rank: usize, padding: i64) -> Result<Tensor> {
        self.check_length(x, axis, self.seq)?;
        let parts = self.ranges[rank].iter().map(|range| {
            if range.start < self.seq {
                return x.f_narrow(axis as i64, range.start, range.end - range.start).context("sharding");
            }
            let mut shape = x.size();
            shape[axis] = range.end - range.start;
            Tensor::f_full(shape, padding, (x.kind(), x.device())).context("sharding")
        });
        Tensor::f_cat(&parts.collect::<Result<Vec<_>>>()?, axis as i64).context("sharding")
    }

    /// The inverse of [`shard`](Self::shard): every rank's part, concatenated along `axis` in rank order, back in the
    /// order of the sequence and without padding. Differentiable.
    ///
    /// # Errors
    /// [`Error::Shape`] when the tensor is not as long as all parts together.
    pub fn restore(&self, x: &Tensor, axis: usize) -> Result<Tensor> {
        let global = self.to_global(x, axis)?;
        global.f_narrow(axis as i64, 0, self.seq).context("restoring the sequence")
    }

    /// Gathers every rank's part along `axis` and restores the order of the sequence: the same on all ranks. Without
    /// gradient.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Comm`].
    pub fn gather(&self, x: &Tensor, axis: usize, group: &Group) -> Result<Tensor> {
        self.check_group(group)?;
        self.restore(&group.all_gather_uneven(x, axis, &self.lengths())?, axis)
    }

    /// From rank order to the order of the sequence, padding last.
    pub(crate) fn to_global(&self, x: &Tensor, axis: usize) -> Result<Tensor> {
        self.check_length(x, axis, self.padded())?;
        let mut offset = 0;
        let mut pieces: Vec<(i64, Range<i64>)> = Vec::new();
        for range in self.ranges.iter().flatten() {
            let length = range.end - range.start;
            pieces.push((range.start, offset..offset + length));
            offset += length;
        }
        pieces.sort_by_key(|(start, _)| *start);
        reorder(x, axis, pieces.into_iter().map(|(_, piece)| piece))
    }

    /// From the order of the sequence, padding last, to rank order.
    pub(crate) fn to_ranks(&self, x: &Tensor, axis: usize) -> Result<Tensor> {
        self.check_length(x, axis, self.padded())?;
        reorder(x, axis, self.ranges.iter().flatten().cloned())
    }

    pub(crate) fn check_group(&self, group: &Group) -> Result<()> {
        if group.size() == self.ranks() {
            return Ok(());
        }
        Err(Error::Shape {
            what: "sharding",
            got: format!("a sharding over {} ranks for a group of {}", self.ranks(), group.size()),
            expected: "one list of ranges for each rank of the group".into(),
        })
    }

    fn check_length(&self, x: &Tensor, axis: usize, length: i64) -> Result<()> {
        let size = x.size();
        if size.get(axis) == Some(&length) {
            return Ok(());
        }
        Err(Error::Shape {
            what: "sharding",
            got: format!("a tensor of shape {size:?}"),
            expected: format!("{length} tokens along axis {axis}"),
        })
    }
}

/// The concatenation of pieces of `x`; `x` itself where that changes nothing.
fn reorder(x: &Tensor, axis: usize, pieces: impl Iterator<Item = Range<i64>>) -> Result<Tensor> {
    let pieces: Vec<_> = pieces.collect();
    if pieces.windows(2).all(|pair| pair[0].end == pair[1].start) {
        return Ok(x.shallow_clone());
    }
    let parts = pieces.iter().map(|piece| x.f_narrow(axis as i64, piece.start, piece.end - piece.start));
    let parts = parts.collect::<std::result::Result<Vec<_>, _>>().context("reordering the sequence")?;
    Tensor::f_cat(&parts, axis as i64).context("reordering the sequence")
}

/// `count` consecutive ranges of a sequence, whose lengths differ by one at most.
pub(crate) fn chunks(seq: usize, count: usize) -> impl Iterator<Item = Range<usize>> {
    // In 128 bits, since the product of two lengths may not fit into 64.
    let cut = move |i: usize| (i as u128 * seq as u128 / count as u128) as usize;
    (0..count).map(move |i| cut(i)..cut(i + 1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::{Device, Kind};

    #[test]
    fn head_tail_is_the_published_order() {
        let sharding = Sharding::head_tail(16, 4).unwrap();
        let held: Vec<_> = (0..4).map(|rank| sharding.ranges(rank).to_vec()).collect();
        // Ranks 0 to 3 hold chunks {0, 7}, {1, 6}, {2, 5}, {3, 4} of two tokens; the last two are neighbours.
        assert_eq!(held, [vec![0..2, 14..16], vec![2..4, 12..14], vec![4..6, 10..12], vec![6..10]]);
    }

    #[test]
    fn a_rank_without_tokens_gets_padding() {
        let sharding = Sharding::contiguous(2, 4).unwrap();
        assert_eq!(sharding.lengths(), [1; 4]);
        assert_eq!(sharding.padded(), 4);
        let x = Tensor::from_slice(&[5_i64, 6]);
        let parts: Vec<_> = (0..4).map(|rank| sharding.shard(&x, 0, rank, -1).unwrap()).collect();
        let all = Tensor::cat(&parts, 0);
        assert_eq!(Vec::<i64>::try_from(&all.sort(0, false).0).unwrap(), [-1, -1, 5, 6]);
        assert_eq!(sharding.restore(&all, 0).unwrap(), x);
    }

    #[test]
    fn bad_ranges_are_refused() {
        let reason = |ranges| Sharding::new(4, ranges).unwrap_err().to_string();
        assert!(reason(vec![vec![0..2], vec![3..4]]).contains("token 2 is held by no rank"));
        assert!(reason(vec![vec![0..2], vec![1..4]]).contains("token 1 is held by no rank, or by two"));
        assert!(reason(vec![vec![0..2], vec![2..3]]).contains("cover 3 tokens"));
        assert!(reason(vec![vec![2..4, 0..2]]).contains("rank 0 do not ascend"));
        assert!(reason(vec![]).contains("no rank"));
        let x = Tensor::zeros([3, 5], (Kind::Float, Device::Cpu));
        let message = Sharding::contiguous(4, 2).unwrap().shard(&x, 1, 0, 0).unwrap_err().to_string();
        assert!(message.contains("[3, 5]") && message.contains("4 tokens along axis 1"), "{message}");
    }

    proptest! {
        #[test]
        fn parts_restore_the_sequence(seq in 1usize..40, ranks in 1usize..9, head_tail: bool) {
            let make = if head_tail { Sharding::head_tail } else { Sharding::contiguous };
            let sharding = make(seq, ranks).unwrap();
            let x = Tensor::arange(2 * seq as i64, (Kind::Int64, Device::Cpu)).reshape([2, seq as i64]);
            let parts: Vec<_> = (0..ranks).map(|rank| sharding.shard(&x, 1, rank, -1).unwrap()).collect();
            for (part, length) in parts.iter().zip(sharding.lengths()) {
                prop_assert_eq!(part.size(), [2, length as i64]);
                prop_assert!(length >= 1);
            }
            let all = Tensor::cat(&parts, 1);
            prop_assert_eq!(sharding.restore(&all, 1).unwrap(), x);
            let global = sharding.to_global(&all, 1).unwrap();
            prop_assert_eq!(sharding.to_ranks(&global, 1).unwrap(), all);
        }
    }
}
