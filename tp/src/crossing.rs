//! The way between the residual stream and the split products.
//!
//! Between the split products, activations `[batch, sequence, features]` lie on each rank as a share of the sequence
//! (sequence parallelism: Korthikanti et al. 2022, <https://arxiv.org/abs/2205.05198>) or whole (Shoeybi et al. 2019,
//! <https://arxiv.org/abs/1909.08053>). The products read whole sequences and leave partial sums of whole sequences.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrotitan_comm::{Group, Pending, ReduceOp};
use ferrotitan_nn::{Activation, Gemm, Projection, Result};
use tch::Tensor;

use crate::error::carried;
use crate::packing::{enter_packed, pack, packed};
use crate::pieces::Pieces;
use crate::shares::share_lengths;

/// How the residual stream of a model lies on the ranks. Clones belong to one model.
#[derive(Debug, Clone)]
pub(crate) struct Residual {
    group: Group,
    sequence_parallel: bool,
    pieces: usize,
    /// The length of the whole sequences that the running layer is at: a share does not tell it.
    length: Arc<AtomicUsize>,
}

impl Residual {
    /// Activations travel in so many `pieces`, each while its neighbour is multiplied.
    pub(crate) fn new(group: Group, sequence_parallel: bool, pieces: usize) -> Self {
        Self { group, sequence_parallel, pieces, length: Arc::default() }
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Notes the length of the whole sequences that the next products work on.
    pub(crate) fn set_length(&self, length: i64) {
        self.length.store(usize::try_from(length).unwrap_or(0), Ordering::Relaxed);
    }

    /// The way in and out for sequences of that length; backward passes keep it.
    pub(crate) fn crossing(&self) -> Crossing {
        let length = self.length.load(Ordering::Relaxed);
        let shares = self.sequence_parallel.then(|| share_lengths(length, self.group.size()));
        Crossing { group: self.group.clone(), shares, pieces: self.pieces }
    }
}

/// The way in and out of a split product.
#[derive(Debug, Clone)]
pub(crate) struct Crossing {
    group: Group,
    /// The ranks' shares of the sequence; absent where every rank holds the whole.
    shares: Option<Vec<usize>>,
    pieces: usize,
}

impl Crossing {
    /// The residual stream in the form in which it enters these products, which take it so from here on. A whole stream
    /// does not travel, and stays as it is.
    pub(crate) fn pack(&self, activation: Activation, x: &Tensor, gemms: &mut [Arc<dyn Gemm>]) -> Result<Tensor> {
        match self.shares {
            Some(_) => pack(activation, x, gemms),
            None => Ok(x.shallow_clone()),
        }
    }

    /// [`Crossing::enter_autograd`] for these projections, and the projections that take what entered.
    pub(crate) fn enter_for(&self, x: &Tensor, projections: &[Projection]) -> Result<(Tensor, Vec<Projection>)> {
        let mut gemms: Vec<_> = projections.iter().map(|projection| Arc::clone(&projection.gemm)).collect();
        let packed = match self.shares {
            Some(_) => tch::no_grad(|| packed(Activation::Input, x, &mut gemms))?,
            None => None,
        };
        let entered = match packed {
            Some(packed) => enter_packed(self.clone(), packed, x)?,
            None => self.enter_autograd(x)?,
        };
        let taking = |(projection, gemm): (&Projection, _)| Projection { weight: projection.weight.clone(), gemm };
        Ok((entered, projections.iter().zip(gemms).map(taking).collect()))
    }

    /// From the residual stream to whole sequences: an all-gather, or nothing.
    pub(crate) fn enter_start(&self, x: &Tensor) -> Result<Pending<Tensor>> {
        match &self.shares {
            Some(shares) => self.group.all_gather_uneven_start(x, axis(x), shares).map_err(carried("entering")),
            None => Ok(Pending::ready(x.shallow_clone())),
        }
    }

    /// From partial sums of whole sequences to the residual stream: a reduce-scatter, or an all-reduce.
    pub(crate) fn leave_start(&self, partial: &Tensor) -> Result<Pending<Tensor>> {
        self.leave_part(partial, self.shares.as_deref())
    }

    /// [`Crossing::enter_start`], differentiable: backward leaves.
    pub(crate) fn enter_autograd(&self, x: &Tensor) -> Result<Tensor> {
        let entered = match &self.shares {
            Some(shares) => self.group.all_gather_autograd(x, axis(x), Some(shares)),
            None => self.group.copy_autograd(x),
        };
        entered.map_err(carried("entering"))
    }

    /// [`Crossing::leave_start`], differentiable: backward enters.
    pub(crate) fn leave_autograd(&self, partial: &Tensor) -> Result<Tensor> {
        let left = match &self.shares {
            Some(shares) => self.group.reduce_scatter_autograd(partial, axis(partial), Some(shares)),
            None => self.group.all_reduce_autograd(partial),
        };
        left.map_err(carried("leaving"))
    }

    /// Products of the whole sequences of which `x` is the rank's part of the residual stream; a piece arrives while the
    /// one before it is multiplied.
    pub(crate) fn enter_then(
        &self,
        x: &Tensor,
        products: impl Fn(&Tensor) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let Some(shares) = &self.shares else { return products(x) };
        let (axis, rank) = (axis(x), self.group.rank());
        let pieces = Pieces::new(axis, shares, self.pieces);
        let start = |piece| {
            let own = pieces.of_share(x, rank, piece)?;
            self.group.all_gather_uneven_start(&own, axis, pieces.lengths(piece)).map_err(carried("entering"))
        };
        let mut arriving = start(0)?;
        let mut parts: Vec<Vec<Tensor>> = Vec::new();
        for piece in 0..pieces.count() {
            // The next piece is on its way before this one is waited for.
            let next = (piece + 1 < pieces.count()).then(|| start(piece + 1)).transpose()?;
            let whole = arriving.wait().map_err(carried("entering"))?;
            for (index, product) in products(&whole)?.into_iter().enumerate() {
                match parts.get_mut(index) {
                    Some(parts) => parts.push(product),
                    None => parts.push(vec![product]),
                }
            }
            match next {
                Some(next) => arriving = next,
                None => break,
            }
        }
        parts.iter().map(|parts| pieces.join(parts)).collect()
    }

    /// The residual stream of a product whose terms lie on the ranks; a piece leaves while the one after it is multiplied.
    pub(crate) fn then_leave(&self, x: &Tensor, product: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let axis = axis(x);
        let whole = [x.size().get(axis).map_or(0, |&length| length as usize)];
        let pieces = Pieces::new(axis, self.shares.as_deref().unwrap_or(&whole), self.pieces);
        let mut leaving: Option<Pending<Tensor>> = None;
        let mut parts = Vec::new();
        for piece in 0..pieces.count() {
            let partial = product(&pieces.of_whole(x, piece)?)?;
            let started = self.leave_part(&partial, self.shares.is_some().then(|| pieces.lengths(piece)))?;
            if let Some(before) = leaving.replace(started) {
                parts.push(before.wait().map_err(carried("leaving"))?);
            }
        }
        if let Some(last) = leaving {
            parts.push(last.wait().map_err(carried("leaving"))?);
        }
        match parts.as_slice() {
            [only] => Ok(only.shallow_clone()),
            // A share's own pieces stand one behind the other.
            _ => crate::error::Context::context(Tensor::f_cat(&parts, axis as i64), "leaving"),
        }
    }

    fn leave_part(&self, partial: &Tensor, shares: Option<&[usize]>) -> Result<Pending<Tensor>> {
        let left = match shares {
            Some(shares) => self.group.reduce_scatter_uneven_start(partial, axis(partial), shares),
            None => self.group.all_reduce_start(partial, ReduceOp::Sum),
        };
        left.map_err(carried("leaving"))
    }
}

/// The axis of the sequence: the last but one.
fn axis(x: &Tensor) -> usize {
    x.dim().saturating_sub(2)
}
