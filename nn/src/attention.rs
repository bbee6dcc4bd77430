//! The seam at attention proper, and the default by libtorch.

use std::fmt::Debug;

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use tch::{Device, Tensor};

use crate::error::Context as _;
use crate::feed_forward::exactly;
use crate::kept::{self, Operation, kept};
use crate::{Batch, Error, Result};

/// Causal attention between the projections.
///
/// Shape suffixes: b batch, s sequence, h query heads, g key-value heads (h is a multiple of g), k features of a head.
pub trait Attention: Debug + Send {
    /// `q_bshk`, `k_bsgk`, `v_bsgk` in, `[b, s, h, k]` out, in the dtype of `q`.
    ///
    /// Where the batch names documents, a token attends within its own alone.
    ///
    /// # Errors
    /// When the shapes do not fit or libtorch fails.
    fn forward(&mut self, q_bshk: &Tensor, k_bsgk: &Tensor, v_bsgk: &Tensor, batch: &Batch) -> Result<Tensor>;
}

/// libtorch's scaled dot-product attention: flash kernels, key-value heads never copied.
///
/// Documents are attended to one by one, so that no mask is ever built and the work falls with their lengths.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sdpa;

impl Attention for Sdpa {
    fn forward(&mut self, q_bshk: &Tensor, k_bsgk: &Tensor, v_bsgk: &Tensor, batch: &Batch) -> Result<Tensor> {
        let heads_first = |x: &Tensor| x.f_transpose(1, 2).context("attention");
        let (q, k, v) = (heads_first(q_bshk)?, heads_first(k_bsgk)?, heads_first(v_bsgk)?);
        let out = match &batch.documents {
            Some(documents) if !documents.is_trivial() => by_document(&q, &k, &v, documents.lengths())?,
            _ => causal(&q, &k, &v)?,
        };
        heads_first(&out)
    }
}

fn causal(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    if kept::is_running() && Flash::applies(&[q, k, v]) {
        return exactly(autograd::apply(Flash, &[q, k, v])?).map(|[out]| out);
    }
    let grouped = q.size()[1] != k.size()[1];
    Tensor::f_scaled_dot_product_attention(q, k, v, None::<&Tensor>, 0.0, true, None, grouped).context("attention")
}

fn by_document(q: &Tensor, k: &Tensor, v: &Tensor, lengths: &[Vec<i64>]) -> Result<Tensor> {
    let size = q.size();
    if lengths.len() as i64 != size[0] || lengths.iter().any(|l| l.iter().sum::<i64>() != size[2]) {
        return Err(Error::Shape {
            module: "attention",
            got: format!("documents of {} sequences", lengths.len()),
            expected: format!("documents that fill {} sequences of {} tokens", size[0], size[2]),
        });
    }
    let sequences = lengths.iter().enumerate().map(|(row, lengths)| {
        let cut = |x: &Tensor, start, length| x.narrow(0, row as i64, 1).narrow(2, start, length);
        let mut start = 0;
        let documents = lengths.iter().map(|&length| {
            let out = causal(&cut(q, start, length), &cut(k, start, length), &cut(v, start, length));
            start += length;
            out
        });
        Tensor::f_cat(&documents.collect::<Result<Vec<_>>>()?, 2).context("attention")
    });
    Tensor::f_cat(&sequences.collect::<Result<Vec<_>>>()?, 0).context("attention")
}

/// The flash kernel that libtorch's attention takes on a CPU, as a function whose outputs can be kept: its backward
/// needs the log-sum-exp of the scores, which libtorch's own function does not give out.
struct Flash;

impl Flash {
    /// Whether libtorch's attention takes that kernel.
    fn applies(inputs: &[&Tensor]) -> bool {
        let features = |x: &Tensor| x.size().last().copied();
        inputs.iter().all(|x| {
            let dense = x.numel() > 0 && x.stride().last() == Some(&1);
            x.device() == Device::Cpu && dense && features(x) == features(inputs[0])
        })
    }
}

impl Function for Flash {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        let [q, k, v] = inputs else { return Err("attention takes three tensors".into()) };
        let mut outputs = kept(Operation::Attention, || {
            let forward = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu;
            let (out, lse) = forward(q, k, v, 0.0, true, None::<&Tensor>, None)?;
            Ok::<_, BoxError>(vec![out, lse])
        })?;
        context.save(inputs);
        context.save(&outputs);
        outputs.truncate(1);
        Ok(outputs)
    }

    fn backward(
        &mut self,
        context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(Some(grad)) = upstream.into_iter().next() else { return Ok(vec![None, None, None]) };
        let saved = context.saved()?;
        let [q, k, v, out, lse] = saved.as_slice() else { return Err("attention saved five tensors".into()) };
        let backward = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward;
        let (dq, dk, dv) = backward(&grad, q, k, v, out, lse, 0.0, true, None::<&Tensor>, None)?;
        Ok(vec![Some(dq), Some(dk), Some(dv)])
    }
}
