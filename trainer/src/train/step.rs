//! One optimizer step.

use std::ops::Range;

use anyhow::ensure;
use ferrotitan_comm::{DeviceMesh, ReduceOp};
use ferrotitan_data as data;
use ferrotitan_mesh::View;
use ferrotitan_nn::{Batch, Documents};
use ferrotitan_optim::{AdamW, NormKind, clip_gradients, gradient_norm};
use tch::{Device, Kind, Tensor};

use super::SPANS;
use super::compose::Composition;
use super::watch::{Phase, Rank};
use crate::config::sections::AttnMask;
use crate::plan::Plan;

/// All ranks that a part of the loss may be on: those that share one, of whichever stage.
pub(super) const HAS_LOSS: View = View::LOSS.union(View::PP);

/// What a step came to, the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    /// Mean loss of the valid tokens of the global batch.
    pub loss: f64,
    /// Global norm of the gradients before clipping.
    pub gradient_norm: f64,
    /// The largest mean loss of one data-parallel rank's tokens where metrics are exported, elsewhere the mean.
    pub largest_loss: f64,
}

/// A step that no rank took.
#[derive(Debug, thiserror::Error)]
#[error(
    "the loss is {loss} and the gradient norm {norm} on samples {samples:?}; no parameter was updated. A lower optimizer.lr, \
     a longer lr_scheduler.warmup_steps or a wider training.mixed_precision_param may help"
)]
pub(super) struct Diverged {
    loss: f64,
    norm: f64,
    samples: Range<u64>,
}

/// Runs one step over this rank's share of the global batch, and updates the parameters by the learning rate's `factor`.
#[allow(clippy::too_many_arguments, reason = "a rank has so many parts")]
pub(super) fn step(
    plan: &Plan,
    mesh: &DeviceMesh,
    watched: &Rank,
    largest: bool,
    composition: &mut Composition,
    optimizer: &mut AdamW,
    share: &data::Batch,
    factor: f64,
) -> anyhow::Result<Outcome> {
    // Counted over all ranks and microbatches before the first forward pass: the one divisor of the step.
    let tokens = mesh.group(View::BATCH)?.all_reduce_scalar(share.valid_tokens() as f64, ReduceOp::Sum)?;
    ensure!(tokens > 0.0, "no token of the batch {:?} has a label", share.samples);
    // Summed where it is, and read once: to read a number waits for the device.
    let mut local = Tensor::zeros([], (Kind::Double, mesh.device()));
    let size = plan.data.local_batch;
    for microbatch in 0..plan.data.accumulation {
        let rows = share.rows(microbatch * size..(microbatch + 1) * size)?;
        let rows = batch(&rows, plan.attn_mask, mesh.device())?;
        let last = microbatch + 1 == plan.data.accumulation;
        local += composition.train(rows, tokens, last)?.to_kind(Kind::Double);
    }
    watched.at(Phase::Optimizer);
    composition.finish_gradients()?;
    let parameters = &composition.parameters;
    let loss = mesh.group(HAS_LOSS)?.all_reduce_scalar(local.double_value(&[]), ReduceOp::Sum)? / tokens;
    let norm = gradient_norm(parameters, NormKind::Two, mesh)?;
    // Two more collectives, for whoever looks.
    let largest_loss = match largest {
        true => largest_mean(mesh, local.double_value(&[]), share.valid_tokens())?,
        false => loss,
    };
    // Both are sums over all ranks, so either every rank stops here or none does.
    if !(loss.is_finite() && norm.is_finite()) {
        return Err(Diverged { loss, norm, samples: share.samples.clone() }.into());
    }
    let _optimizer = tracing::trace_span!(target: SPANS, "optimizer").entered();
    if let Some(max_norm) = plan.max_norm {
        clip_gradients(parameters, norm, max_norm)?;
    }
    optimizer.step(factor)?;
    optimizer.clear_gradients()?;
    composition.after_update()?;
    Ok(Outcome { loss, gradient_norm: norm, largest_loss })
}

/// The largest mean loss of the valid tokens of a data-parallel rank, which has its loss in parts on several ranks.
fn largest_mean(mesh: &DeviceMesh, local: f64, tokens: u64) -> anyhow::Result<f64> {
    let parts = HAS_LOSS.without(View::BATCH);
    let sum = mesh.group(parts)?.all_reduce_scalar(local, ReduceOp::Sum)?;
    let mean = if tokens > 0 { sum / tokens as f64 } else { f64::NEG_INFINITY };
    Ok(mesh.group(View::BATCH)?.all_reduce_scalar(mean, ReduceOp::Max)?)
}

/// A rank's rows as a batch of the model.
pub(super) fn batch(rows: &data::Batch, mask: AttnMask, device: Device) -> anyhow::Result<Batch> {
    let shape = [rows.batch as i64, rows.seq_len as i64];
    let matrix = |values: &[i64]| Tensor::from_slice(values).view(shape).to_device(device);
    let mut batch = Batch::new(matrix(&rows.tokens), Some(matrix(&rows.labels)))?;
    if mask == AttnMask::BlockCausal {
        batch.positions = matrix(&rows.positions);
        batch.documents = Some(Documents::from_ids(&rows.documents, rows.seq_len)?);
    }
    Ok(batch)
}
