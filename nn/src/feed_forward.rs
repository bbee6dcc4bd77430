//! The gated feed-forward network (SwiGLU: Shazeer 2020, <https://arxiv.org/abs/2002.05202>).

use tch::Tensor;

use crate::error::Context as _;
use crate::{Error, Linear, Parameter, Result, Seam};

/// `w2(silu(w1 x) · w3 x)`.
#[derive(Debug)]
pub struct FeedForward {
    name: String,
    /// `w1` and `w3`: one input, two projections.
    gate_and_up: Box<dyn Linear>,
    /// `w2`.
    down: Box<dyn Linear>,
}

impl FeedForward {
    /// Of `w1` and `w3` together, and `w2`.
    #[must_use]
    pub fn new(name: &str, gate_and_up: Box<dyn Linear>, down: Box<dyn Linear>) -> Self {
        Self { name: name.into(), gate_and_up, down }
    }

    /// `[…, dim]` in, `[…, dim]` out.
    ///
    /// # Errors
    /// When a weight has no storage or the shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = exactly(self.gate_and_up.forward(x)?)?;
        let hidden = gate.f_silu().and_then(|gate| gate.f_mul(&up)).context("FeedForward")?;
        let [out] = exactly(self.down.forward(&hidden)?)?;
        Ok(out)
    }

    /// `w1`, `w3`, `w2`.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        let projections = self.gate_and_up.projections().iter().chain(self.down.projections());
        projections.map(|projection| projection.weight.clone()).collect()
    }

    /// Both `Linear`s, for the layer that this is part of.
    pub fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        vec![
            (format!("{}.w13", self.name), Seam::Linear(&mut self.gate_and_up)),
            (format!("{}.w2", self.name), Seam::Linear(&mut self.down)),
        ]
    }
}

/// The outputs of a `Linear` of `N` projections.
pub(crate) fn exactly<const N: usize>(outputs: Vec<Tensor>) -> Result<[Tensor; N]> {
    let got = outputs.len();
    outputs.try_into().map_err(|_| Error::Shape {
        module: "Linear",
        got: format!("{got} projections"),
        expected: format!("{N}"),
    })
}
