//! Full activation checkpointing (Chen et al. 2016, <https://arxiv.org/abs/1604.06174>).

use std::sync::{Arc, Mutex, PoisonError};

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use tch::Tensor;

use crate::{Batch, Error, Layer, Parameter, Result, Seam};

/// Keeps a layer's input alone, and computes the rest again in the backward pass.
#[derive(Debug)]
pub struct ActivationCheckpoint {
    // Shared with the backward node, which outlives the forward call.
    inner: Arc<Mutex<Box<dyn Layer>>>,
}

impl ActivationCheckpoint {
    /// Wraps a layer.
    #[must_use]
    pub fn new(inner: Box<dyn Layer>) -> Self {
        Self { inner: Arc::new(Mutex::new(inner)) }
    }
}

impl Layer for ActivationCheckpoint {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        let again = Recompute { inner: Arc::clone(&self.inner), batch: batch.shallow_clone() };
        if !autograd::is_grad_enabled() || !x.requires_grad() {
            // Nothing to recompute for, or (the first layer) no input gradient that would call for it.
            return again.run(x);
        }
        let mut outputs = autograd::apply(again, &[x])?;
        outputs.pop().ok_or_else(|| Error::Config("a checkpointed layer gave no output".into()))
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).parameters()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        // No backward is running while the model is being transformed, so the layer is ours alone.
        match Arc::get_mut(&mut self.inner) {
            Some(inner) => inner.get_mut().unwrap_or_else(PoisonError::into_inner).seams(),
            None => Vec::new(),
        }
    }
}

struct Recompute {
    inner: Arc<Mutex<Box<dyn Layer>>>,
    batch: Batch,
}

impl Recompute {
    fn run(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).forward(x, &self.batch)
    }
}

impl Function for Recompute {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        context.save(inputs);
        Ok(vec![self.run(&inputs[0])?])
    }

    fn backward(
        &mut self,
        context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(upstream @ Some(_)) = upstream.into_iter().next() else { return Ok(vec![None]) };
        let x = context.saved()?.remove(0).detach().set_requires_grad(true);
        let output = tch::with_grad(|| self.run(&x))?;
        // A backward, not a gradient of chosen inputs: the parameters' gradients accumulate, and their hooks run, as in
        // a layer that is not checkpointed.
        autograd::backward(&[output], &[upstream], false)?;
        let gradient = x.grad();
        Ok(vec![gradient.defined().then_some(gradient)])
    }
}
