//! The loss on text that is not trained on.

use std::sync::Arc;

use anyhow::ensure;
use ferrotitan_comm::{DeviceMesh, ReduceOp};
use ferrotitan_data::{Cursor, Dataset, Loader, LoaderOptions};
use ferrotitan_mesh::{Mesh as _, View};

use super::compose::Composition;
use super::step::batch;
use crate::plan::{Plan, ValidationPlan};

/// Mean loss of the valid tokens of the first batches of `dataset`, always the same ones.
pub(super) fn loss(
    plan: &Plan,
    validation: &ValidationPlan,
    dataset: &Arc<Dataset>,
    mesh: &DeviceMesh,
    composition: &mut Composition,
) -> anyhow::Result<f64> {
    let (rank, ranks) = (mesh.index(View::BATCH) as u64, mesh.size(View::BATCH) as u64);
    let global_batch = validation.local_batch as u64 * ranks;
    // Agreed before the loop, so that no rank waits for one that has run out.
    let available = dataset.steps(Cursor::default(), global_batch);
    let batches = match (validation.batches, available) {
        (Some(asked), Some(available)) => asked.min(available),
        (asked, available) => asked.or(available).unwrap_or(1),
    };
    let options = LoaderOptions::new(global_batch).for_rank(rank, ranks);
    let loader = Loader::new(Arc::clone(dataset), Cursor::default(), options)?;
    let (mut local, mut valid) = (0.0, 0.0);
    for rows in loader.take(batches as usize) {
        let rows = rows?;
        let tokens = composition.share(batch(&rows, plan.attn_mask, mesh.device())?)?;
        let sum = tch::no_grad(|| composition.model.forward(&tokens))?;
        local += sum.double_value(&[]);
        valid += rows.valid_tokens() as f64;
    }
    let loss = mesh.group(View::LOSS)?.all_reduce_scalar(local, ReduceOp::Sum)?;
    let tokens = mesh.group(View::BATCH)?.all_reduce_scalar(valid, ReduceOp::Sum)?;
    ensure!(tokens > 0.0, "no token of the validation data has a label");
    Ok(loss / tokens)
}
