//! The sequence cut into pieces that travel one at a time.

use ferrotitan_nn::Result;
use tch::Tensor;

use crate::error::Context as _;
use crate::shares::share;

/// A cut of every rank's share of the sequence into equally many pieces: piece `c` of the whole consists of piece `c` of
/// each share. So each piece gathers and scatters as the whole does, and every rank works on every piece.
#[derive(Debug)]
pub(crate) struct Pieces {
    axis: i64,
    /// `lengths[piece][share]`.
    lengths: Vec<Vec<usize>>,
}

impl Pieces {
    /// At most `count` pieces along `axis`; fewer where the longest share is shorter.
    pub(crate) fn new(axis: usize, shares: &[usize], count: usize) -> Self {
        let count = count.min(shares.iter().copied().max().unwrap_or(0)).max(1);
        let piece = |piece| shares.iter().map(|&length| share(length, piece, count).len()).collect();
        Self { axis: axis as i64, lengths: (0..count).map(piece).collect() }
    }

    /// How many pieces there are.
    pub(crate) fn count(&self) -> usize {
        self.lengths.len()
    }

    /// What each share has of a piece.
    pub(crate) fn lengths(&self, piece: usize) -> &[usize] {
        &self.lengths[piece]
    }

    /// A piece of one share.
    pub(crate) fn of_share(&self, x: &Tensor, share: usize, piece: usize) -> Result<Tensor> {
        let start: usize = self.lengths[..piece].iter().map(|piece| piece[share]).sum();
        self.narrow(x, start, self.lengths[piece][share])
    }

    /// A piece of the whole.
    pub(crate) fn of_whole(&self, x: &Tensor, piece: usize) -> Result<Tensor> {
        if self.count() == 1 {
            return Ok(x.shallow_clone());
        }
        let mut offset = 0;
        let mut parts = Vec::new();
        for share in 0..self.lengths[piece].len() {
            let before: usize = self.lengths[..piece].iter().map(|piece| piece[share]).sum();
            parts.push(self.narrow(x, offset + before, self.lengths[piece][share])?);
            offset += self.lengths.iter().map(|piece| piece[share]).sum::<usize>();
        }
        Tensor::f_cat(&parts, self.axis).context("a piece of the sequence")
    }

    /// The whole of its pieces.
    pub(crate) fn join(&self, pieces: &[Tensor]) -> Result<Tensor> {
        if let [only] = pieces {
            return Ok(only.shallow_clone());
        }
        let mut parts = Vec::new();
        for share in 0..self.lengths[0].len() {
            for (piece, lengths) in pieces.iter().zip(&self.lengths) {
                parts.push(self.narrow(piece, lengths[..share].iter().sum(), lengths[share])?);
            }
        }
        Tensor::f_cat(&parts, self.axis).context("the pieces of a sequence")
    }

    fn narrow(&self, x: &Tensor, start: usize, length: usize) -> Result<Tensor> {
        x.f_narrow(self.axis, start as i64, length as i64).context("a piece of the sequence")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use tch::{Device, Kind};

    use super::*;

    proptest! {
        #[test]
        fn pieces_join_to_the_whole(shares in prop::collection::vec(0_usize..6, 1..5), count in 1_usize..5) {
            let length: usize = shares.iter().sum();
            let x = Tensor::arange(2 * length as i64 * 3, (Kind::Float, Device::Cpu)).view([2, length as i64, 3]);
            let pieces = Pieces::new(1, &shares, count);
            prop_assert!(pieces.count() <= count);
            let parts: Vec<_> = (0..pieces.count()).map(|piece| pieces.of_whole(&x, piece).unwrap()).collect();
            prop_assert_eq!(pieces.join(&parts).unwrap(), x.shallow_clone());
            // The same pieces, gathered from the shares.
            let mut offset = 0;
            let held: Vec<_> = shares.iter().map(|&n| { offset += n; x.narrow(1, (offset - n) as i64, n as i64) }).collect();
            for (piece, part) in parts.iter().enumerate() {
                let own = |share| pieces.of_share(&held[share], share, piece).unwrap();
                let gathered = Tensor::cat(&(0..held.len()).map(own).collect::<Vec<_>>(), 1);
                prop_assert_eq!(&gathered, part);
                prop_assert_eq!(part.size()[1] as usize, pieces.lengths(piece).iter().sum::<usize>());
            }
        }
    }
}
