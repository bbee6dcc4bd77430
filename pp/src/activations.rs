//! What travels between stages, and what a stage keeps of a microbatch between its forward and its backward.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_nn::{Batch, Model};
use tch::{Kind, Tensor};

use crate::Result;
use crate::error::Context as _;

/// The shape and dtype of what one stage hands to the next, and of the gradient that comes back.
///
/// Stages do not ask each other: a receive is posted before the sender has computed what it will send.
#[derive(Clone)]
pub struct Activations {
    shape: Arc<Shape>,
    kind: Kind,
}

type Shape = dyn Fn(&Batch) -> Vec<i64> + Send + Sync;

impl fmt::Debug for Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Activations").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Activations {
    /// `[batch, sequence, features]` in the dtype of the layers' outputs (the compute dtype where one is set).
    #[must_use]
    pub fn new(features: i64, kind: Kind) -> Self {
        Self::with_shape(
            move |batch| {
                let mut shape = batch.tokens.size();
                shape.push(features);
                shape
            },
            kind,
        )
    }

    /// A shape of one's own for each microbatch, such as `[batch, sequence / t, features]` where tensor-parallel ranks
    /// share the sequence.
    #[must_use]
    pub fn with_shape(shape: impl Fn(&Batch) -> Vec<i64> + Send + Sync + 'static, kind: Kind) -> Self {
        Self { shape: Arc::new(shape), kind }
    }

    pub(crate) fn shape(&self, batch: &Batch) -> Vec<i64> {
        (self.shape)(batch)
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }
}

/// A stage's forward on one microbatch, until its backward.
///
/// The stage's output is not kept: whether its values are needed again is for the operation that made it to say.
pub(crate) struct Live {
    input: Tensor,
    /// Stands for the output in a backward pass; absent where nothing behind it is trained.
    root: Option<Tensor>,
    upstream: Upstream,
}

/// The gradient of a stage's output, once it is there.
type Upstream = Arc<Mutex<Option<Tensor>>>;

impl Live {
    /// Runs a stage on the activations of the stage before, or on the tokens where there is none. Gives its output
    /// without a graph, and what remains for the backward.
    pub(crate) fn forward(model: &mut Model, input: Option<&Tensor>, batch: &Batch) -> Result<(Tensor, Self)> {
        let tracked = input.is_some() && autograd::is_grad_enabled();
        let input = input.unwrap_or(&batch.tokens).f_detach().context("a stage's input")?.set_requires_grad(tracked);
        let output = model.forward_from(&input, batch)?;
        let upstream = Upstream::default();
        let root = match output.requires_grad() {
            true => autograd::apply(Exit(Arc::clone(&upstream)), &[&output])?.pop(),
            false => None,
        };
        Ok((output.f_detach().context("a stage's output")?, Self { input, root, upstream }))
    }

    /// Runs the backward from the gradient of the output; that of a loss is `scale`. Gives the gradient of the input,
    /// where it is activations.
    pub(crate) fn backward(self, upstream: Option<Tensor>, scale: Option<f64>) -> Result<Option<Tensor>> {
        if let Some(root) = self.root {
            let upstream = match upstream {
                Some(upstream) => upstream,
                None => root.f_full_like(scale.unwrap_or(1.0)).context("the gradient of the loss")?,
            };
            *self.upstream.lock().unwrap_or_else(PoisonError::into_inner) = Some(upstream);
            autograd::backward(&[root], &[None], false)?;
        }
        if !self.input.requires_grad() {
            return Ok(None);
        }
        let gradient = self.input.grad();
        let gradient = if gradient.defined() { gradient } else { self.input.zeros_like() };
        Ok(Some(gradient))
    }
}

/// From a stage's output to a scalar that stands for it, so that the output itself can be let go. Backward hands out the
/// gradient that has been put into the slot.
struct Exit(Upstream);

impl Function for Exit {
    fn forward(&mut self, _context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        Ok(vec![Tensor::f_zeros([], (inputs[0].kind(), inputs[0].device()))?])
    }

    fn backward(
        &mut self,
        _context: &mut Context,
        _upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        Ok(vec![self.0.lock().unwrap_or_else(PoisonError::into_inner).take()])
    }
}
