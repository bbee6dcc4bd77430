//! The seam at the loss, and cross-entropy that never holds all logits.

use std::fmt::Debug;

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use tch::{Kind, Reduction, Tensor};

use crate::error::Context as _;
use crate::feed_forward::exactly;
use crate::{Batch, Error, IGNORE_INDEX, Layer, Linear, Parameter, Result, Seam};

/// Hidden states and labels in, the sum of the tokens' losses out.
pub trait Loss: Debug + Send {
    /// `hidden` `[batch, seq, dim]`, the head's projection to logits, `labels` int64 `[batch, seq]`; the sum of the
    /// losses of all tokens that have a label, a scalar in fp32 (fp64 where the hidden states are).
    ///
    /// A sum, not a mean: the caller divides once by the number of valid tokens of the whole global step.
    ///
    /// # Errors
    /// When the shapes do not fit or libtorch fails.
    fn forward(&mut self, hidden: &Tensor, head: &dyn Linear, labels: &Tensor) -> Result<Tensor>;
}

/// Cross-entropy over a chunk of tokens at a time.
///
/// A chunk's gradients are computed with its loss, in the forward pass, so that its logits can be dropped at once and are
/// never computed twice.
#[derive(Debug, Clone, Copy)]
pub struct ChunkedCrossEntropy {
    /// How many logits are held at most. At least one token's are.
    pub logits: usize,
}

impl Default for ChunkedCrossEntropy {
    fn default() -> Self {
        // 128 MiB of fp32: 261 tokens of Llama 3's vocabulary, which keeps the products efficient.
        Self { logits: 1 << 25 }
    }
}

impl Loss for ChunkedCrossEntropy {
    fn forward(&mut self, hidden: &Tensor, head: &dyn Linear, labels: &Tensor) -> Result<Tensor> {
        let vocabulary = head.projections().iter().map(|p| p.weight.layout().shape()[0]).sum::<usize>();
        let chunk = self.logits / vocabulary.max(1);
        loss_by_chunk(hidden, head, labels, chunk, |hidden, labels| cross_entropy(hidden, head, labels))
    }
}

/// The sum of the losses that `of` gives for `chunk` tokens at a time (at least one): of their hidden states
/// `[tokens, dim]` and labels `[tokens]`, a scalar, differentiable in the hidden states and in the weights of `head`.
///
/// Where there are several chunks, each one's gradients are computed with its loss, and what its forward pass saved is
/// dropped before the next.
///
/// # Errors
/// When `of` fails, a weight has no storage, the shapes do not fit, or a `Gemm` of the head defers its weight gradient
/// while there are several chunks.
pub fn loss_by_chunk(
    hidden: &Tensor,
    head: &dyn Linear,
    labels: &Tensor,
    chunk: usize,
    of: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let (hidden, labels) = (tokens_first(hidden)?, labels.f_reshape([-1]).context("loss")?);
    let chunk = i64::try_from(chunk).unwrap_or(i64::MAX).max(1);
    let mut inputs = vec![hidden.shallow_clone()];
    for projection in head.projections() {
        let weight = projection.weight.leaf()?;
        if weight.requires_grad() {
            inputs.push(weight);
        }
    }
    // Without a gradient to compute, and where one chunk holds everything, there is nothing to gain from the function
    // below.
    let tracked = autograd::is_grad_enabled() && inputs.iter().any(Tensor::requires_grad);
    if !tracked || hidden.size()[0] <= chunk {
        let mut sum = Tensor::zeros([], (accumulate_in(hidden.kind()), hidden.device()));
        for (hidden, labels) in chunks(&hidden, &labels, chunk) {
            sum = sum.f_add(&of(&hidden, &labels)?).context("loss")?;
        }
        return Ok(sum);
    }
    let mut losses = Vec::new();
    let mut gradients: Vec<Option<Tensor>> = inputs.iter().map(|_| None).collect();
    let mut hidden_gradients = Vec::new();
    for (hidden, labels) in chunks(&hidden.detach(), &labels, chunk) {
        inputs[0] = hidden.set_requires_grad(true);
        let loss = of(&inputs[0], &labels)?;
        let mut parts = autograd::grad(&[loss.shallow_clone()], &inputs, &[None], false, false)?.into_iter();
        hidden_gradients.push(parts.next().flatten().unwrap_or_else(|| inputs[0].zeros_like()));
        for (sum, part) in gradients[1..].iter_mut().zip(parts) {
            // One that came later would not know of what the loss is scaled by.
            let part = part.ok_or_else(|| {
                Error::Config("a loss in chunks needs the head's weight gradient at once: do not defer it there".into())
            })?;
            // Many small parts: their sum is not left to bf16.
            let part = part.f_to_kind(accumulate_in(part.kind())).context("loss")?;
            *sum = Some(match sum.take() {
                Some(mut sum) => sum.f_add_(&part).context("loss")?,
                None => part,
            });
        }
        losses.push(loss.detach());
    }
    gradients[0] = Some(Tensor::f_cat(&hidden_gradients, 0).context("loss")?);
    inputs[0] = hidden;
    let sum = losses.into_iter().reduce(|a, b| a + b).ok_or_else(|| Error::Config("a batch without tokens".into()))?;
    let references: Vec<&Tensor> = inputs.iter().collect();
    let kinds = inputs.iter().map(Tensor::kind).collect();
    exactly::<1>(autograd::apply(Known { sum, gradients, kinds }, &references)?).map(|[sum]| sum)
}

/// A scalar whose gradients are known already. They are given away by the first backward pass: beside a large head, a
/// second copy would be the largest tensor of the step.
struct Known {
    sum: Tensor,
    gradients: Vec<Option<Tensor>>,
    kinds: Vec<Kind>,
}

impl Function for Known {
    fn forward(&mut self, _context: &mut Context, _inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        Ok(vec![self.sum.shallow_clone()])
    }

    fn backward(
        &mut self,
        _context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(Some(scale)) = upstream.into_iter().next() else {
            return Ok(self.kinds.iter().map(|_| None).collect());
        };
        if self.gradients.is_empty() {
            return Err("the gradients of a loss in chunks are gone after the first backward pass".into());
        }
        // Scaled in fp32: one over the number of tokens is no number of bf16.
        let scaled = std::mem::take(&mut self.gradients).into_iter().zip(&self.kinds).map(|(gradient, &kind)| {
            gradient.map(|g| g.f_to_kind(accumulate_in(kind))?.f_mul(&scale)?.f_to_kind(kind)).transpose()
        });
        Ok(scaled.collect::<std::result::Result<_, _>>()?)
    }
}

/// fp32, or fp64 for fp64: in what losses are summed.
fn accumulate_in(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

fn tokens_first(hidden: &Tensor) -> Result<Tensor> {
    let features = hidden.size().last().copied().unwrap_or(1);
    hidden.f_reshape([-1, features]).context("loss")
}

fn chunks(hidden: &Tensor, labels: &Tensor, chunk: i64) -> Vec<(Tensor, Tensor)> {
    hidden.split(chunk, 0).into_iter().zip(labels.split(chunk, 0)).collect()
}

fn cross_entropy(hidden: &Tensor, head: &dyn Linear, labels: &Tensor) -> Result<Tensor> {
    let [logits] = exactly(head.forward(hidden)?)?;
    let logits = logits.f_to_kind(accumulate_in(logits.kind())).context("loss")?;
    logits.f_cross_entropy_loss(labels, None::<&Tensor>, Reduction::Sum, IGNORE_INDEX, 0.0).context("loss")
}

/// The last layer: the projection to the vocabulary, and the loss.
///
/// Gives the sum of the losses where the batch has labels, else the logits `[batch, seq, vocabulary]`.
#[derive(Debug)]
pub struct Head {
    name: String,
    output: Box<dyn Linear>,
    loss: Box<dyn Loss>,
}

impl Head {
    /// A head with chunked cross-entropy.
    #[must_use]
    pub fn new(name: &str, output: Box<dyn Linear>) -> Self {
        Self { name: name.into(), output, loss: Box::new(ChunkedCrossEntropy::default()) }
    }
}

impl Layer for Head {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        match &batch.labels {
            Some(labels) => self.loss.forward(x, &*self.output, labels),
            None => exactly(self.output.forward(x)?).map(|[logits]| logits),
        }
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.output.projections().iter().map(|projection| projection.weight.clone()).collect()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        vec![(self.name.clone(), Seam::Linear(&mut self.output)), ("loss".into(), Seam::Loss(&mut self.loss))]
    }
}
