//! Root-mean-square normalization (Zhang and Sennrich 2019, <https://arxiv.org/abs/1910.07467>).

use ferrotitan_mesh::rng::Distribution;
use tch::Tensor;

use crate::error::Context as _;
use crate::{Batch, Layer, Parameter, Result};

/// `x / sqrt(mean(x²) + eps) · weight` over the last axis; reduced-precision inputs are normalized in fp32.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Parameter,
    eps: f64,
}

impl RmsNorm {
    /// Over `features` features, its weight starting at one.
    #[must_use]
    pub fn new(name: &str, features: usize, eps: f64) -> Self {
        let weight = Parameter::new(format!("{name}.weight"), &[features], Distribution::Constant(1.0));
        Self { weight, eps }
    }

    /// Normalizes `x` `[…, features]`.
    ///
    /// # Errors
    /// When the weight has no storage or the shapes do not fit.
    pub fn normalize(&self, x: &Tensor) -> Result<Tensor> {
        let weight = self.weight.value()?;
        x.f_rms_norm(weight.size(), Some(&weight), self.eps).context("RmsNorm")
    }

    /// `[features]`.
    #[must_use]
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }
}

impl Layer for RmsNorm {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> Result<Tensor> {
        self.normalize(x)
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.weight.clone()]
    }
}
