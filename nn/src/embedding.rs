//! Token embeddings.

use ferrotitan_mesh::rng::Distribution;
use tch::Tensor;

use crate::error::Context as _;
use crate::{Batch, Layer, Parameter, Result};

/// A table of one vector a token.
#[derive(Debug)]
pub struct Embedding {
    weight: Parameter,
}

impl Embedding {
    /// A table of `vocabulary` rows of `features`.
    #[must_use]
    pub fn new(name: &str, vocabulary: usize, features: usize, init: Distribution) -> Self {
        Self { weight: Parameter::new(format!("{name}.weight"), &[vocabulary, features], init) }
    }

    /// `[vocabulary, features]`.
    #[must_use]
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }
}

impl Layer for Embedding {
    /// Token ids `[batch, seq]` in, vectors `[batch, seq, features]` out.
    fn forward(&mut self, tokens: &Tensor, _batch: &Batch) -> Result<Tensor> {
        Tensor::f_embedding(&self.weight.value()?, tokens, -1, false, false).context("Embedding")
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.weight.clone()]
    }
}
