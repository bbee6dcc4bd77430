//! A rank's part of the model: built without storage, the features attached in a fixed order, then materialized.
//!
//! The order: split stages, tensor parallel, Float8, context parallel, activation checkpointing, shard, materialize. A dimension of one rank
//! attaches too, and its collectives are identities. A feature that was left out of the build is not here, and the check
//! of the config refuses what would need it.

use ferrotitan_comm::DeviceMesh;
use ferrotitan_ext::autograd;
#[cfg(feature = "fsdp")]
use ferrotitan_mesh::{Mesh as _, View};
#[cfg(any(feature = "cp", feature = "pp", feature = "tp"))]
use ferrotitan_nn::Transform as _;
use ferrotitan_nn::{ActivationCheckpoint, Batch, Layer, Materialize, Model, Parameter, llama};
use tch::{Device, Tensor};

use super::SPANS;
#[cfg(feature = "float8")]
use crate::config::sections::Float8Recipe;
#[cfg(feature = "cp")]
use crate::config::sections::RotateMethod;
#[cfg(feature = "cp")]
use crate::plan::Balance;
#[cfg(feature = "fsdp")]
use crate::plan::Reshard;
#[cfg(feature = "float8")]
use crate::plan::{Float8Plan, ScaleSharing};
use crate::plan::{Plan, Recompute};

/// A rank's part of the model, and what belongs around its passes.
#[derive(Debug)]
pub(super) struct Composition {
    passes: Passes,
    /// This rank's parameters.
    pub parameters: Vec<Parameter>,
    /// When the pipeline began each pass since somebody took them, and what it computed.
    #[cfg(feature = "pp")]
    pipeline_spans: Vec<(std::time::Instant, Vec<ferrotitan_schedule::Span>)>,
    #[cfg(feature = "float8")]
    eight_bits: Option<ferrotitan_float8::Handle>,
    #[cfg(feature = "cp")]
    context: ferrotitan_cp::ContextParallel,
    #[cfg(feature = "fsdp")]
    shards: ferrotitan_fsdp::Handle,
    #[cfg(feature = "fsdp")]
    replicas_alone: bool,
}

/// How a batch goes through the model.
#[derive(Debug)]
enum Passes {
    /// Through all layers.
    Whole(Model),
    /// In microbatches through the stages of a pipeline.
    #[cfg(feature = "pp")]
    Pipeline(Box<ferrotitan_pp::Pipeline>, usize),
}

impl Composition {
    /// Builds, transforms and materializes.
    pub(super) fn new(plan: &Plan, mesh: &DeviceMesh) -> anyhow::Result<Self> {
        let mut model = llama::build(&plan.model)?;
        #[cfg(feature = "tp")]
        let tensor_parallel = tensor_parallel(plan, mesh, &model)?;
        #[cfg(feature = "float8")]
        let float8 = plan.float8.as_ref().map(|plan| float8(plan, mesh, &model)).transpose()?;
        #[cfg(feature = "pp")]
        if let Some(pipeline) = &plan.parallel.pipeline {
            pipeline.partition.apply(&mut model, mesh)?;
        }
        #[cfg(feature = "tp")]
        tensor_parallel.apply(&mut model, mesh)?;
        // A mistake on purpose, which a test asks for: `ablate` has to notice it.
        #[cfg(feature = "broken-reduction")]
        for norm in model.parameters().iter().filter(|parameter| parameter.name() == "norm.weight") {
            norm.set_reader(None);
        }
        #[cfg(feature = "float8")]
        let eight_bits = float8.map(|float8| float8.attach(&mut model)).transpose()?;
        #[cfg(feature = "cp")]
        let context = context_parallel(plan, mesh)?;
        #[cfg(feature = "cp")]
        context.apply(&mut model, mesh)?;
        recompute(&mut model, plan.recompute);
        #[cfg(feature = "fsdp")]
        let shards = {
            let shard = fully_sharded(plan, mesh);
            #[cfg(feature = "float8")]
            let shard = match &eight_bits {
                Some(eight_bits) => shard.with_wires(eight_bits.wires()),
                None => shard,
            };
            shard.attach(&mut model)?
        };

        let kind = plan.precision.parameters.kind();
        let compute = plan.precision.compute.kind();
        let compute = (compute != kind).then_some(compute);
        let device = if plan.parallel.cpu_offload { Device::Cpu } else { mesh.device() };
        model.materialize(&Materialize { seed: plan.seed, kind, compute, device }, mesh)?;
        let parameters = model.parameters();
        #[cfg(feature = "pp")]
        let passes = match &plan.parallel.pipeline {
            Some(stages) => {
                let pipeline = super::stages::pipeline(
                    plan,
                    stages,
                    mesh,
                    model,
                    #[cfg(feature = "fsdp")]
                    &shards,
                )?;
                Passes::Pipeline(Box::new(pipeline), stages.schedule.microbatches)
            }
            None => Passes::Whole(model),
        };
        #[cfg(not(feature = "pp"))]
        let passes = Passes::Whole(model);
        let composition = Self {
            passes,
            parameters,
            #[cfg(feature = "pp")]
            pipeline_spans: Vec::new(),
            #[cfg(feature = "float8")]
            eight_bits,
            #[cfg(feature = "cp")]
            context,
            #[cfg(feature = "fsdp")]
            shards,
            #[cfg(feature = "fsdp")]
            replicas_alone: mesh.size(View::FSDP) == 1,
        };
        composition.after_update()?;
        Ok(composition)
    }

    /// Forward and backward of one pass of a step: the sum of the losses of this rank's tokens, whose gradient is divided by
    /// `tokens`. Zero on a rank that has no loss.
    ///
    /// Shards keep their sums as shards, to hold no whole gradient between passes; whole gradients are reduced by the last.
    pub(super) fn train(&mut self, batch: Batch, tokens: f64, last: bool) -> anyhow::Result<Tensor> {
        #[cfg(not(feature = "fsdp"))]
        let _ = last;
        match &mut self.passes {
            Passes::Whole(model) => {
                #[cfg(feature = "cp")]
                let batch = self.context.shard_batch(&batch)?;
                let sum = tracing::trace_span!(target: SPANS, "forward").in_scope(|| model.forward(&batch))?;
                let _backward = tracing::trace_span!(target: SPANS, "backward").entered();
                #[cfg(feature = "fsdp")]
                self.shards.set_requires_reduction(last || !self.replicas_alone);
                autograd::backward(&[sum.f_div_scalar(tokens)?], &[], false)?;
                #[cfg(feature = "fsdp")]
                self.shards.finish_backward()?;
                Ok(sum.detach())
            }
            #[cfg(feature = "pp")]
            Passes::Pipeline(pipeline, count) => {
                let parts = microbatches(
                    &batch,
                    *count,
                    #[cfg(feature = "cp")]
                    &self.context,
                )?;
                let began = std::time::Instant::now();
                let sum = pipeline.step(&parts, tokens)?;
                self.pipeline_spans.push((began, pipeline.statistics().spans.clone()));
                Ok(sum)
            }
        }
    }

    /// Forward alone: the sum of the losses of this rank's tokens.
    pub(super) fn evaluate(&mut self, batch: Batch) -> anyhow::Result<Tensor> {
        match &mut self.passes {
            Passes::Whole(model) => {
                #[cfg(feature = "cp")]
                let batch = self.context.shard_batch(&batch)?;
                Ok(tch::no_grad(|| model.forward(&batch))?)
            }
            #[cfg(feature = "pp")]
            Passes::Pipeline(pipeline, count) => {
                let parts = microbatches(
                    &batch,
                    *count,
                    #[cfg(feature = "cp")]
                    &self.context,
                )?;
                Ok(pipeline.evaluate(&parts)?)
            }
        }
    }

    /// What the stages of a pipeline computed in the passes of the last step, in seconds since a moment each.
    #[cfg(feature = "pp")]
    pub(super) fn take_pipeline_spans(&mut self) -> Vec<(std::time::Instant, Vec<ferrotitan_schedule::Span>)> {
        std::mem::take(&mut self.pipeline_spans)
    }

    /// Forgets what Float8 noted since the last step: a validation is no part of training.
    pub(super) fn forget_magnitudes(&self) {
        #[cfg(feature = "float8")]
        if let Some(eight_bits) = &self.eight_bits {
            eight_bits.forget_seen();
        }
    }

    /// What delayed scaling remembers, by weight.
    #[cfg(all(feature = "checkpoint", feature = "float8"))]
    pub(super) fn float8_histories(&self) -> std::collections::BTreeMap<String, [Vec<f32>; 3]> {
        self.eight_bits.as_ref().map(ferrotitan_float8::Handle::histories).unwrap_or_default()
    }

    /// Puts back what [`float8_histories`](Self::float8_histories) gave.
    #[cfg(all(feature = "checkpoint", feature = "float8"))]
    pub(super) fn restore_float8(
        &self,
        histories: &std::collections::BTreeMap<String, [Vec<f32>; 3]>,
    ) -> anyhow::Result<()> {
        match &self.eight_bits {
            Some(eight_bits) => Ok(eight_bits.restore(histories)?),
            None => Ok(()),
        }
    }

    /// The stages that hold one of this rank's parameters; none: all.
    #[cfg(all(feature = "checkpoint", feature = "float8"))]
    pub(super) fn stages_of(&self, name: &str) -> Vec<usize> {
        let parameter = self.parameters.iter().find(|parameter| parameter.name() == name);
        parameter.map(|parameter| parameter.layout().stages().to_vec()).unwrap_or_default()
    }

    /// After the last backward pass of a step.
    pub(super) fn finish_gradients(&self) -> anyhow::Result<()> {
        #[cfg(feature = "float8")]
        if let Some(eight_bits) = &self.eight_bits {
            eight_bits.finish_gradients()?;
        }
        Ok(())
    }

    /// Once parameters have changed.
    pub(super) fn after_update(&self) -> anyhow::Result<()> {
        #[cfg(feature = "float8")]
        if let Some(eight_bits) = &self.eight_bits {
            eight_bits.precompute_scales()?;
        }
        Ok(())
    }
}

/// The microbatches of a pass, of each this rank's tokens.
#[cfg(feature = "pp")]
fn microbatches(
    batch: &Batch,
    count: usize,
    #[cfg(feature = "cp")] context: &ferrotitan_cp::ContextParallel,
) -> anyhow::Result<Vec<Batch>> {
    let parts = ferrotitan_pp::microbatches(batch, count)?;
    #[cfg(feature = "cp")]
    let parts = parts.iter().map(|part| context.shard_batch(part)).collect::<Result<Vec<_>, _>>()?;
    Ok(parts)
}

/// Wraps the blocks that do not keep all their activations.
fn recompute(model: &mut Model, what: Recompute) {
    type Wrap = fn(Box<dyn Layer>) -> ActivationCheckpoint;
    let (every, wrap): (usize, Wrap) = match what {
        Recompute::Nothing => return,
        Recompute::Blocks { every } => (every, ActivationCheckpoint::new),
        Recompute::ByOperation => (1, ActivationCheckpoint::by_operation),
    };
    let blocks = model.layers_mut().iter_mut().filter(|named| named.name.starts_with("layers."));
    for named in blocks.skip(every.saturating_sub(1)).step_by(every.max(1)) {
        named.wrap(|block| Box::new(wrap(block)));
    }
}

#[cfg(feature = "tp")]
fn tensor_parallel(plan: &Plan, mesh: &DeviceMesh, whole: &Model) -> anyhow::Result<ferrotitan_tp::TensorParallel> {
    let options = ferrotitan_tp::Options {
        sequence_parallel: plan.parallel.sequence_parallel,
        loss_parallel: plan.parallel.loss_parallel,
        async_tp: plan.parallel.async_tensor_parallel,
    };
    let table = ferrotitan_tp::Plan::llama(&plan.model);
    table.check(whole.parameters().iter().map(Parameter::name))?;
    Ok(ferrotitan_tp::TensorParallel::new(mesh.clone(), options, table))
}

#[cfg(feature = "cp")]
fn context_parallel(plan: &Plan, mesh: &DeviceMesh) -> anyhow::Result<ferrotitan_cp::ContextParallel> {
    use ferrotitan_cp::{Balance as Dealt, ContextOptions, Method};
    let method = match plan.parallel.rotate_method {
        RotateMethod::AllGather => Method::AllGather,
        RotateMethod::AllToAll | RotateMethod::Ring => Method::Ring,
        RotateMethod::Ulysses => Method::AllToAll,
    };
    let balance = match plan.parallel.balance {
        Balance::HeadTail => Dealt::HeadTail,
        Balance::Documents => Dealt::Documents,
        Balance::Contiguous => Dealt::Contiguous,
    };
    let options = ContextOptions { method, balance };
    Ok(ferrotitan_cp::ContextParallel::new(mesh, options)?)
}

#[cfg(feature = "fsdp")]
fn fully_sharded(plan: &Plan, mesh: &DeviceMesh) -> ferrotitan_fsdp::Fsdp {
    use ferrotitan_fsdp::{Fsdp, Options, Reshard as Kept};
    let reshard_after_forward = match plan.parallel.reshard_after_forward {
        Reshard::Default => Kept::Default,
        Reshard::Always => Kept::Always,
        Reshard::Never => Kept::Never,
        Reshard::Ranks(ranks) => Kept::Ranks(ranks),
    };
    let reduce = Some(plan.precision.reduce.kind());
    Fsdp::new(mesh, Options { reshard_after_forward, reduce, ..Options::default() })
}

#[cfg(feature = "float8")]
fn float8(plan: &Float8Plan, mesh: &DeviceMesh, whole: &Model) -> anyhow::Result<ferrotitan_float8::Float8> {
    use ferrotitan_float8::{Float8, Options, Recipe};
    let recipe = match plan.sharing {
        ScaleSharing::Recipe(Float8Recipe::Tensorwise) => Recipe::Tensorwise,
        ScaleSharing::Recipe(Float8Recipe::Rowwise) => Recipe::Rowwise,
        ScaleSharing::Recipe(Float8Recipe::RowwiseWithGwHp) => Recipe::RowwiseWithGwHp,
        ScaleSharing::Block => Recipe::Mxfp8,
    };
    let options = Options {
        recipe,
        filter_fqns: plan.filter_fqns.clone(),
        emulate: plan.emulate,
        delayed: plan.amax_history,
        enable_fsdp_float8_all_gather: plan.all_gather,
        precompute_float8_dynamic_scale_for_fsdp: plan.precompute_scales,
        ..Options::default()
    };
    let float8 = Float8::new(options).with_mesh(mesh);
    float8.check(whole.parameters().iter().map(Parameter::name))?;
    Ok(float8)
}
