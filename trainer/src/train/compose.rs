//! A rank's part of the model: built without storage, the features attached in a fixed order, then materialized.
//!
//! The order: tensor parallel, context parallel, activation checkpointing, shard, materialize. A dimension of one rank
//! attaches too, and its collectives are identities. A feature that was left out of the build is not here, and the check
//! of the config refuses what would need it.

use ferrotitan_comm::DeviceMesh;
use ferrotitan_nn::{ActivationCheckpoint, Batch, Materialize, Model, Parameter, Transform, llama};

use crate::plan::Plan;

/// The model, and what belongs around its passes.
#[derive(Debug)]
pub(super) struct Composition {
    /// This rank's part of the model.
    pub model: Model,
    /// Its parameters.
    pub parameters: Vec<Parameter>,
    #[cfg(feature = "cp")]
    context: ferrotitan_cp::ContextParallel,
    #[cfg(feature = "fsdp")]
    shards: ferrotitan_fsdp::Handle,
    #[cfg(feature = "fsdp")]
    replicas_alone: bool,
}

impl Composition {
    /// Builds, transforms and materializes.
    pub(super) fn new(plan: &Plan, mesh: &DeviceMesh) -> anyhow::Result<Self> {
        let mut model = llama::build(&plan.model)?;
        #[cfg(feature = "tp")]
        tensor_parallel(plan, mesh).apply(&mut model, mesh)?;
        #[cfg(feature = "cp")]
        let context = context_parallel(plan, mesh)?;
        #[cfg(feature = "cp")]
        context.apply(&mut model, mesh)?;
        if let Some(every) = plan.recompute_every {
            recompute(&mut model, every);
        }
        #[cfg(feature = "fsdp")]
        let shards = fully_sharded(plan, mesh)?.attach(&mut model)?;

        let kind = plan.precision.parameters.kind();
        let compute = plan.precision.compute.kind();
        let compute = (compute != kind).then_some(compute);
        model.materialize(&Materialize { seed: plan.seed, kind, compute, device: mesh.device() }, mesh)?;
        Ok(Self {
            parameters: model.parameters(),
            model,
            #[cfg(feature = "cp")]
            context,
            #[cfg(feature = "fsdp")]
            shards,
            #[cfg(feature = "fsdp")]
            replicas_alone: ferrotitan_mesh::Mesh::size(mesh, ferrotitan_mesh::View::FSDP) == 1,
        })
    }

    /// The part of a batch that this rank computes: its tokens of each sequence.
    pub(super) fn share(&self, batch: Batch) -> anyhow::Result<Batch> {
        #[cfg(feature = "cp")]
        let batch = self.context.shard_batch(&batch)?;
        Ok(batch)
    }

    /// Before the backward pass of a microbatch.
    ///
    /// Shards keep their sums as shards, to hold no whole gradient between microbatches; whole gradients are reduced once.
    pub(super) fn before_backward(&self, last_microbatch: bool) {
        #[cfg(feature = "fsdp")]
        self.shards.set_requires_reduction(last_microbatch || !self.replicas_alone);
        #[cfg(not(feature = "fsdp"))]
        let _ = last_microbatch;
    }

    /// After the last backward pass of a step: every gradient is the sum over all ranks that share the loss.
    pub(super) fn finish_backward(&self) -> anyhow::Result<()> {
        #[cfg(feature = "fsdp")]
        self.shards.finish_backward()?;
        Ok(())
    }
}

/// Every so many blocks, one keeps its input alone.
fn recompute(model: &mut Model, every: usize) {
    let blocks = model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers."));
    for named in blocks.skip(every.saturating_sub(1)).step_by(every.max(1)) {
        named.wrap(|block| Box::new(ActivationCheckpoint::new(block)));
    }
}

#[cfg(feature = "tp")]
fn tensor_parallel(plan: &Plan, mesh: &DeviceMesh) -> impl Transform {
    let options = ferrotitan_tp::Options {
        sequence_parallel: plan.parallel.sequence_parallel,
        loss_parallel: plan.parallel.loss_parallel,
        async_tp: plan.parallel.async_tensor_parallel,
    };
    ferrotitan_tp::TensorParallel::new(mesh.clone(), options, ferrotitan_tp::Plan::llama(&plan.model))
}

#[cfg(feature = "cp")]
fn context_parallel(plan: &Plan, mesh: &DeviceMesh) -> anyhow::Result<ferrotitan_cp::ContextParallel> {
    use ferrotitan_cp::Balance;
    let balance = match plan.parallel.context_balance.as_str() {
        "headtail" => Balance::HeadTail,
        "documents" => Balance::Documents,
        _ => Balance::Contiguous,
    };
    let options = ferrotitan_cp::ContextOptions { method: plan.parallel.context_method.parse()?, balance };
    Ok(ferrotitan_cp::ContextParallel::new(mesh, options)?)
}

#[cfg(feature = "fsdp")]
fn fully_sharded(plan: &Plan, mesh: &DeviceMesh) -> anyhow::Result<ferrotitan_fsdp::Fsdp> {
    let options = ferrotitan_fsdp::Options {
        reshard_after_forward: plan.parallel.reshard_after_forward.parse()?,
        reduce: Some(plan.precision.reduce.kind()),
        ..ferrotitan_fsdp::Options::default()
    };
    Ok(ferrotitan_fsdp::Fsdp::new(mesh, options))
}
