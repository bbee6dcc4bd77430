//! Activation checkpointing (Chen et al. 2016, <https://arxiv.org/abs/1604.06174>), of whole layers and by operation
//! (Korthikanti et al. 2022, <https://arxiv.org/abs/2205.05198>).

use std::sync::{Arc, Mutex, PoisonError};

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use tch::Tensor;

use crate::kept::{self, Kept};
use crate::{Batch, Error, Layer, Parameter, Result, Seam};

/// Keeps a layer's input, and computes the rest again in the backward pass: all of it, or what is cheap.
///
/// The numbers are the same to the bit. Of two that stand inside each other, the outer one by operation decides.
#[derive(Debug)]
pub struct ActivationCheckpoint {
    // Shared with the backward node, which outlives the forward call.
    inner: Arc<Mutex<Box<dyn Layer>>>,
    by_operation: bool,
}

impl ActivationCheckpoint {
    /// Keeps the input alone.
    #[must_use]
    pub fn new(inner: Box<dyn Layer>) -> Self {
        Self { inner: Arc::new(Mutex::new(inner)), by_operation: false }
    }

    /// Keeps the input and the outputs of operations that cost much: as TorchTitan, of every second matrix product, of
    /// attention, and of products that are summed over ranks. The others are computed again.
    ///
    /// An operation takes part by [`kept`](crate::kept): every product behind the [`Gemm`](crate::Gemm) seam does, and
    /// [`Sdpa`](crate::Sdpa) where libtorch's flash kernel for the CPU applies. One that does not is computed again.
    #[must_use]
    pub fn by_operation(inner: Box<dyn Layer>) -> Self {
        Self { by_operation: true, ..Self::new(inner) }
    }
}

impl Layer for ActivationCheckpoint {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        let kept = self.by_operation.then(Kept::default);
        let again = Recompute { inner: Arc::clone(&self.inner), batch: batch.shallow_clone(), kept };
        if !autograd::is_grad_enabled() || !x.requires_grad() || kept::is_running() {
            // Nothing to recompute for, or (the first layer) no input gradient that would call for it, or someone
            // around this does it.
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
    kept: Option<Kept>,
}

impl Recompute {
    fn run(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).forward(x, &self.batch)
    }
}

impl Function for Recompute {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        context.save(inputs);
        let mut kept = self.kept.take();
        let output = match &mut kept {
            Some(kept) => kept.record(|| self.run(&inputs[0]))?,
            None => self.run(&inputs[0])?,
        };
        self.kept = kept;
        Ok(vec![output])
    }

    fn backward(
        &mut self,
        context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(upstream @ Some(_)) = upstream.into_iter().next() else { return Ok(vec![None]) };
        let x = context.saved()?.remove(0).detach().set_requires_grad(true);
        let mut kept = self.kept.take();
        let output = tch::with_grad(|| match &mut kept {
            Some(kept) => kept.replay(|| self.run(&x)),
            None => self.run(&x),
        })?;
        self.kept = kept;
        // A backward, not a gradient of chosen inputs: the parameters' gradients accumulate, and their hooks run, as in
        // a layer that is not checkpointed.
        autograd::backward(&[output], &[upstream], false)?;
        let gradient = x.grad();
        Ok(vec![gradient.defined().then_some(gradient)])
    }
}
