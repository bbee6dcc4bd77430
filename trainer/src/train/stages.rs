//! Pipeline stages beside the other dimensions.

use ferrotitan_comm::DeviceMesh;
use ferrotitan_mesh::{Mesh as _, View};
use ferrotitan_nn::{Batch, Model};
use ferrotitan_pp::{Activations, Pipeline};
use ferrotitan_schedule::{LoweringOptions, lower};

use crate::plan::{PipelinePlan, Plan};

/// The executor of this rank's stages, of a model that everything else was attached to and that has storage.
pub(super) fn pipeline(
    plan: &Plan,
    stages: &PipelinePlan,
    mesh: &DeviceMesh,
    model: Model,
    #[cfg(feature = "fsdp")] shards: &ferrotitan_fsdp::Handle,
) -> anyhow::Result<Pipeline> {
    let lowered = lower(&stages.schedule, &LoweringOptions { unshard: true, ..LoweringOptions::default() })?;
    let pipeline = Pipeline::new(mesh, stages.partition.stages(model), lowered, activations(plan, mesh))?;
    #[cfg(feature = "fsdp")]
    let pipeline = pipeline.with_hooks(units::Units::new(shards.clone(), &stages.partition)?);
    Ok(pipeline)
}

/// What travels: hidden states in the compute dtype, of this rank's tokens alone where tensor-parallel ranks share them.
fn activations(plan: &Plan, mesh: &DeviceMesh) -> Activations {
    let features = plan.model.dim as i64;
    let (index, ranks) = match plan.parallel.sequence_parallel {
        true => (mesh.index(View::TP) as i64, mesh.size(View::TP) as i64),
        false => (0, 1),
    };
    let shape = move |batch: &Batch| {
        let mut shape = batch.tokens.size();
        shape[1] = shape[1] / ranks + i64::from(index < shape[1] % ranks);
        shape.push(features);
        shape
    };
    Activations::with_shape(shape, plan.precision.compute.kind())
}

#[cfg(feature = "fsdp")]
mod units {
    use std::collections::BTreeMap;

    use ferrotitan_comm::BoxError;
    use ferrotitan_fsdp::Handle;
    use ferrotitan_pp::{Partition, StageHooks};

    /// Gathers the units of a stage once a step, and reduces them once, not once a microbatch.
    #[derive(Debug)]
    pub(super) struct Units {
        handle: Handle,
        of_stage: BTreeMap<usize, Vec<usize>>,
    }

    impl Units {
        pub(super) fn new(handle: Handle, partition: &Partition) -> anyhow::Result<Self> {
            let mut of_stage: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
            for unit in 0..handle.units() {
                let name = handle.name(unit)?;
                for stage in name.split('+').filter_map(|layer| partition.stage_of(layer)) {
                    let units = of_stage.entry(stage).or_default();
                    if !units.contains(&unit) {
                        units.push(unit);
                    }
                }
            }
            handle.set_requires_reduction(false);
            Ok(Self { handle, of_stage })
        }

        fn each(&self, stage: usize, of: impl Fn(usize) -> ferrotitan_fsdp::Result<()>) -> Result<(), BoxError> {
            Ok(self.of_stage.get(&stage).into_iter().flatten().try_for_each(|&unit| of(unit))?)
        }
    }

    impl StageHooks for Units {
        fn unshard(&mut self, stage: usize) -> Result<(), BoxError> {
            self.each(stage, |unit| self.handle.unshard(unit))
        }

        fn reshard(&mut self, stage: usize) -> Result<(), BoxError> {
            self.each(stage, |unit| self.handle.reshard(unit))
        }

        fn reduce(&mut self, stage: usize) -> Result<(), BoxError> {
            self.each(stage, |unit| self.handle.reduce(unit))
        }

        fn finish(&mut self) -> Result<(), BoxError> {
            Ok(self.handle.finish_backward()?)
        }
    }
}
