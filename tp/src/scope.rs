//! What tells split products how long the sequences are.

use ferrotitan_nn::{Batch, Layer, Parameter, Result, Seam};
use tch::Tensor;

use crate::crossing::Residual;
use crate::error::Context as _;

/// A layer with split products inside. They see a share of the sequence and no batch; this sees the batch. It says the
/// length anew before each run, also when activation checkpointing runs the layer again.
#[derive(Debug)]
pub(crate) struct Scope {
    inner: Box<dyn Layer>,
    residual: Residual,
}

impl Scope {
    pub(crate) fn new(inner: Box<dyn Layer>, residual: Residual) -> Self {
        Self { inner, residual }
    }
}

impl Layer for Scope {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        let (_, sequence) = batch.positions.size2().context("positions")?;
        self.residual.set_length(sequence);
        self.inner.forward(x, batch)
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.inner.parameters()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        self.inner.seams()
    }
}
