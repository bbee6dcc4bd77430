//! The loss on text that is not trained on.

use std::sync::Arc;

use anyhow::ensure;
use ferrotitan_comm::{DeviceMesh, ReduceOp};
use ferrotitan_data::{Cursor, Dataset, IGNORE, Loader, LoaderOptions};
use ferrotitan_mesh::{Mesh as _, View};

use super::compose::Composition;
use super::step::{HAS_LOSS, batch};
use crate::plan::{Plan, ValidationPlan};

/// Mean loss of the valid tokens of the first samples of `dataset`, always the same ones, on any number of ranks.
pub(super) fn loss(
    plan: &Plan,
    validation: &ValidationPlan,
    dataset: &Arc<Dataset>,
    mesh: &DeviceMesh,
    composition: &mut Composition,
) -> anyhow::Result<f64> {
    let (rank, ranks) = (mesh.index(View::BATCH) as u64, mesh.size(View::BATCH) as u64);
    let asked = validation.batches.map(|batches| batches * validation.local_batch as u64);
    let samples = match (asked, dataset.total()) {
        (Some(asked), Some(total)) => asked.min(total),
        (asked, total) => asked.or(total).unwrap_or(validation.local_batch as u64),
    };
    let global_batch = validation.local_batch as u64 * ranks;
    let options = LoaderOptions::new(global_batch).for_rank(rank, ranks);
    let loader = Loader::new(Arc::clone(dataset), Cursor::default(), options)?;
    let (mut local, mut valid) = (0.0, 0.0);
    // Every rank goes through as many batches, and the last may hold more than was asked for.
    for rows in loader.take(samples.div_ceil(global_batch) as usize) {
        let mut rows = rows?;
        let counted = samples.saturating_sub(rows.samples.start).min(rows.batch as u64) as usize;
        rows.labels[counted * rows.seq_len..].fill(IGNORE);
        let sum = composition.evaluate(batch(&rows, plan.attn_mask, mesh.device())?)?;
        local += sum.double_value(&[]);
        valid += rows.valid_tokens() as f64;
    }
    composition.forget_magnitudes();
    let loss = mesh.group(HAS_LOSS)?.all_reduce_scalar(local, ReduceOp::Sum)?;
    let tokens = mesh.group(View::BATCH)?.all_reduce_scalar(valid, ReduceOp::Sum)?;
    ensure!(tokens > 0.0, "no token of the validation data has a label");
    Ok(loss / tokens)
}
