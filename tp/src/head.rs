//! The projection to a split vocabulary where its logits are wanted whole.

use ferrotitan_comm::Group;
use ferrotitan_nn::{Linear, Loss, Projection, Result};
use tch::Tensor;

use crate::crossing::Residual;
use crate::error::carried;
use crate::shares::share_lengths;

/// The head as a layer calls it: the residual stream in, all logits out. A loss that works on split logits reads the
/// projection instead.
#[derive(Debug)]
pub(crate) struct VocabularyHead {
    logits: WholeLogits,
    residual: Residual,
}

impl VocabularyHead {
    pub(crate) fn new(projections: Vec<Projection>, residual: Residual) -> Self {
        let group = residual.group().clone();
        Self { logits: WholeLogits { projections, group }, residual }
    }
}

impl Linear for VocabularyHead {
    fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let (x, projections) = self.residual.crossing().enter_for(x, &self.logits.projections)?;
        WholeLogits { projections, group: self.logits.group.clone() }.forward(&x)
    }

    fn projections(&self) -> &[Projection] {
        &self.logits.projections
    }

    fn projections_mut(&mut self) -> &mut Vec<Projection> {
        &mut self.logits.projections
    }
}

/// Whole sequences in, all logits out, for whoever does the same with them on every rank. The gradient of its input is
/// this rank's term of a sum.
#[derive(Debug)]
struct WholeLogits {
    projections: Vec<Projection>,
    group: Group,
}

impl Linear for WholeLogits {
    fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let whole = |projection: &Projection| {
            let own = projection.forward(x)?;
            let shares = share_lengths(projection.weight.layout().shape()[0], self.group.size());
            let last = own.dim().saturating_sub(1);
            self.group.gather_autograd(&own, last, Some(&shares)).map_err(carried("gathering logits"))
        };
        self.projections.iter().map(whole).collect()
    }

    fn projections(&self) -> &[Projection] {
        &self.projections
    }

    fn projections_mut(&mut self) -> &mut Vec<Projection> {
        &mut self.projections
    }
}

/// Any loss, computed by every rank of the whole sequences and all logits: what is left of it without loss parallelism.
#[derive(Debug)]
pub(crate) struct GatheredLoss {
    inner: Box<dyn Loss>,
    residual: Residual,
}

impl GatheredLoss {
    pub(crate) fn new(inner: Box<dyn Loss>, residual: Residual) -> Self {
        Self { inner, residual }
    }
}

impl Loss for GatheredLoss {
    fn forward(&mut self, hidden: &Tensor, head: &dyn Linear, labels: &Tensor) -> Result<Tensor> {
        let (hidden, projections) = self.residual.crossing().enter_for(hidden, head.projections())?;
        let group = self.residual.group().clone();
        self.inner.forward(&hidden, &WholeLogits { projections, group }, labels)
    }
}
