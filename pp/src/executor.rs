//! Runs a pipeline's schedule on one rank.

use std::collections::BTreeMap;
use std::fmt;

use ferrotitan_comm::{DeviceMesh, Group};
use ferrotitan_ext::autograd;
use ferrotitan_mesh::{Mesh, View};
use ferrotitan_nn::{Batch, Model, Parameter};
use ferrotitan_schedule::{Kind, Lowered, Span};
use tch::Tensor;

use crate::run::Run;
use crate::{Activations, Deferral, Error, NoHooks, Result, Stage, StageHooks, tied};

/// The stages of one rank, and the schedule that it runs them by.
///
/// Every rank along pp makes one of the same schedule, and calls the same methods in the same order. When one returns an
/// error, the others wait in vain: end this rank, or tell them by [`DeviceMesh::fail`].
pub struct Pipeline {
    group: Group,
    stages: BTreeMap<usize, Model>,
    plan: Lowered,
    activations: Activations,
    hooks: Box<dyn StageHooks>,
    deferral: Deferral,
    sharing: BTreeMap<usize, Vec<usize>>,
    statistics: Statistics,
}

/// What a rank did in a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Statistics {
    /// The most stages times microbatches whose activations were held for input gradients at once:
    /// [`peak_live`](ferrotitan_schedule::RankReport::peak_live) of the verifier.
    pub peak_live: usize,
    /// The most that were held for input or weight gradients at once:
    /// [`peak_held`](ferrotitan_schedule::RankReport::peak_held) of the verifier.
    pub peak_held: usize,
    /// When each computation ran, in seconds since this rank began the step, without the waiting for its inputs. On a
    /// GPU, when it was queued.
    pub spans: Vec<Span>,
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stages: Vec<_> = self.stages.keys().collect();
        let mut pipeline = f.debug_struct("Pipeline");
        pipeline.field("schedule", &self.plan.name).field("group", &self.group).field("stages", &stages);
        pipeline.finish_non_exhaustive()
    }
}

impl Pipeline {
    /// Of this rank's stages and a lowered schedule. Where the schedule has weight gradients of their own, the stages'
    /// projections are made to put theirs off.
    ///
    /// # Errors
    /// [`Error::Ranks`] when the schedule is for another number of ranks than the mesh has along pp;
    /// [`Error::Unsound`] when it could not run; [`Error::Stages`] when it places other stages on this rank.
    pub fn new(mesh: &DeviceMesh, stages: Vec<Stage>, plan: Lowered, activations: Activations) -> Result<Self> {
        let (needed, found) = (plan.ranks.len(), mesh.size(View::PP));
        if needed != found {
            return Err(Error::Ranks { schedule: plan.name, needed, found });
        }
        plan.check()?;
        let group = mesh.group(View::PP)?;
        let rank = group.rank();
        let needed = plan.schedule().stages_of(rank);
        let mut given: Vec<usize> = stages.iter().map(|stage| stage.index).collect();
        given.sort_unstable();
        if given != needed {
            return Err(Error::Stages { schedule: plan.name, rank, given, needed });
        }
        let mut stages: BTreeMap<usize, Model> = stages.into_iter().map(|stage| (stage.index, stage.model)).collect();
        let deferral = Deferral::default();
        if plan.schedule().actions(rank).any(|action| action.kind == Kind::WeightGradient) {
            stages.values_mut().for_each(|model| deferral.attach(model));
        }
        let (sharing, hooks) = (sharing(&stages), Box::new(NoHooks));
        Ok(Self { group, stages, plan, activations, hooks, deferral, sharing, statistics: Statistics::default() })
    }

    /// With somebody who gathers the stages' parameters and reduces their gradients. The schedule must have been lowered
    /// with [`unshard`](ferrotitan_schedule::LoweringOptions::unshard).
    #[must_use]
    pub fn with_hooks(mut self, hooks: impl StageHooks + 'static) -> Self {
        self.hooks = Box::new(hooks);
        self
    }

    /// Runs forwards and backwards of all microbatches. Gives the sum of their losses, not divided by anything: a scalar
    /// in fp64, zero on ranks without the last stage, so that a sum over pp gives it to all.
    ///
    /// Every rank is given all microbatches, of which the first stage reads the tokens and the last one the labels; all
    /// may read positions and documents. `tokens` is the number of labels that count in the whole global step, by which
    /// the loss is divided before it is differentiated (0 is taken for 1: there is nothing to differentiate then).
    /// Gradients are added to those that the parameters have.
    ///
    /// # Errors
    /// [`Error::Microbatches`] for another number than the schedule's; [`Error::Operation`] when a computation fails or
    /// gives another shape than [`Activations`] says, a hook fails, or another rank fails while this one waits for it;
    /// [`Error::Comm`] and [`Error::Hook`] at the end of the step.
    pub fn step(&mut self, microbatches: &[Batch], tokens: f64) -> Result<Tensor> {
        let loss = self.run(microbatches, Some(1.0 / tokens.max(1.0)))?;
        tied::sum_gradients(&self.group, &self.parameters())?;
        Ok(loss)
    }

    /// Runs forwards alone, in the schedule's order, and gives the sum of the losses as [`step`](Self::step) does.
    ///
    /// # Errors
    /// As there.
    pub fn evaluate(&mut self, microbatches: &[Batch]) -> Result<Tensor> {
        autograd::with_grad_mode(false, || self.run(microbatches, None))
    }

    fn run(&mut self, microbatches: &[Batch], scale: Option<f64>) -> Result<Tensor> {
        let (needed, given) = (self.plan.microbatches, microbatches.len());
        if needed != given {
            return Err(Error::Microbatches { schedule: self.plan.name.clone(), needed, given });
        }
        let run = Run {
            group: &self.group,
            plan: &self.plan,
            stages: &mut self.stages,
            hooks: &mut *self.hooks,
            deferral: &self.deferral,
            activations: &self.activations,
            sharing: &self.sharing,
            microbatches,
            scale,
        };
        let (loss, statistics) = run.run()?;
        self.statistics = statistics;
        Ok(loss)
    }

    /// Every parameter of this rank once, in the order of its stages.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut parameters: Vec<Parameter> = Vec::new();
        for parameter in self.stages.values().flat_map(Model::parameters) {
            if !parameters.iter().any(|known| known.is(&parameter)) {
                parameters.push(parameter);
            }
        }
        parameters
    }

    /// The stages of this rank.
    #[must_use]
    pub fn stages(&self) -> Vec<usize> {
        self.stages.keys().copied().collect()
    }

    /// The model of a stage of this rank, to reach into it between steps.
    pub fn stage_mut(&mut self, stage: usize) -> Option<&mut Model> {
        self.stages.get_mut(&stage)
    }

    /// The schedule, with communication in place.
    #[must_use]
    pub fn plan(&self) -> &Lowered {
        &self.plan
    }

    /// What this rank did in its last step, or evaluation, that went well.
    #[must_use]
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }
}

/// For each stage, the others that share a parameter with it.
fn sharing(stages: &BTreeMap<usize, Model>) -> BTreeMap<usize, Vec<usize>> {
    let parameters: Vec<(usize, Vec<Parameter>)> =
        stages.iter().map(|(&stage, model)| (stage, model.parameters())).collect();
    let share = |a: &[Parameter], b: &[Parameter]| a.iter().any(|a| b.iter().any(|b| a.is(b)));
    let others = |stage: usize, own: &[Parameter]| {
        let others = parameters.iter().filter(|(other, theirs)| *other != stage && share(own, theirs));
        others.map(|(other, _)| *other).collect()
    };
    parameters.iter().map(|(stage, own)| (*stage, others(*stage, own))).collect()
}
