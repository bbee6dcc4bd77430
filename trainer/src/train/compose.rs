//! The model of a rank: built without storage, transformed, then materialized.

use ferrotitan_comm::DeviceMesh;
use ferrotitan_nn::{ActivationCheckpoint, Materialize, Model, llama};

use crate::plan::Plan;

/// This rank's part of the model.
pub(super) fn model(plan: &Plan, mesh: &DeviceMesh) -> anyhow::Result<Model> {
    let mut model = llama::build(&plan.model)?;
    if let Some(every) = plan.recompute_every {
        recompute(&mut model, every);
    }
    let kind = plan.precision.parameters.kind();
    let compute = plan.precision.compute.kind();
    let how =
        Materialize { seed: plan.seed, kind, compute: (compute != kind).then_some(compute), device: mesh.device() };
    model.materialize(&how, mesh)?;
    Ok(model)
}

/// Every so many blocks, one keeps its input alone.
fn recompute(model: &mut Model, every: usize) {
    let blocks = model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers."));
    for named in blocks.skip(every.saturating_sub(1)).step_by(every.max(1)) {
        named.wrap(|block| Box::new(ActivationCheckpoint::new(block)));
    }
}
