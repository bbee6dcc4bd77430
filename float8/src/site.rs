//! What one projection knows of its operands' magnitudes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrotitan_comm::{DeviceMesh, Group, ReduceOp};
use ferrotitan_mesh::View;
use ferrotitan_nn::Parameter;
use tch::{Device, Tensor};

use crate::error::Context as _;
use crate::history::History;
use crate::recipe::Axis;
use crate::scale::{amax, scale_for};
use crate::{Error, Format, Operand, Recipe, Result};

/// What all projections of a model have in common.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) recipe: Recipe,
    pub(crate) emulate: bool,
    pub(crate) power_of_two: bool,
    /// Of how many steps magnitudes are remembered, where scales come from those.
    pub(crate) delayed: Option<usize>,
}

/// Who shares a scale.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    /// The ranks that share a projection.
    pub(crate) tp: Group,
    /// The ranks whose tokens share a scale.
    pub(crate) tokens: Group,
    /// The ranks that hold a weight together.
    pub(crate) weight: Group,
    /// All ranks that hold these layers.
    pub(crate) stage: Group,
}

impl Groups {
    pub(crate) fn of(mesh: &DeviceMesh, share_tokens: bool) -> Result<Self> {
        Ok(Self {
            tp: mesh.group(View::TP)?,
            tokens: mesh.group(if share_tokens { View::LOSS } else { View::NONE })?,
            weight: mesh.group(View::FSDP.union(View::TP))?,
            stage: mesh.group(View::WORLD.without(View::PP))?,
        })
    }

    pub(crate) fn alone() -> Self {
        let single = Group::single(Device::Cpu);
        Self { tp: single.clone(), tokens: single.clone(), weight: single.clone(), stage: single }
    }
}

/// The magnitudes of one operand.
#[derive(Debug, Default)]
pub(crate) struct Track {
    /// The largest since the step began, as far as somebody will ask.
    seen: Option<Tensor>,
    history: History,
}

/// A projection's magnitudes and scales, on one rank.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) weight: Parameter,
    pub(crate) settings: Settings,
    groups: Groups,
    /// By operand. Projections of one input have one track of it, whichever of them sees it.
    tracks: [Arc<Mutex<Track>>; 3],
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The scale in which the gathered weight travelled.
    travelled: Option<Tensor>,
    /// The largest magnitude of the whole weight, and its scale, where they were computed ahead.
    ahead: Option<(Tensor, Tensor)>,
}

impl Site {
    /// Of one of the projections whose inputs are noted in `input`.
    pub(crate) fn new(weight: Parameter, settings: Settings, groups: Groups, input: Arc<Mutex<Track>>) -> Self {
        let tracks = [input, Arc::default(), Arc::default()];
        let site = Self { weight, settings, groups, tracks, state: Mutex::default() };
        site.set_history(&Default::default());
        site
    }

    pub(crate) fn name(&self) -> String {
        self.weight.name().to_owned()
    }

    /// The scale of a whole operand, of which this rank has what its layout leaves to it.
    pub(crate) fn scale_of(&self, operand: Operand, x: &Tensor, format: Format) -> Result<Tensor> {
        if operand == Operand::Weight
            && let Some(scale) = &self.state().travelled
        {
            // What arrived was rounded to the dtype that the model computes in, so its own magnitude is another. By the
            // scale that it travelled in it gets back the very codes that it had then.
            return Ok(scale.shallow_clone());
        }
        self.scale_over(operand, x, format, self.groups_of(&operand.axes()))
    }

    /// The scale of a whole operand of which each rank that shares the projection has a part.
    pub(crate) fn scale_of_parts(&self, operand: Operand, part: &Tensor, format: Format) -> Result<Tensor> {
        self.scale_over(operand, part, format, [&self.groups.tokens, &self.groups.tp])
    }

    fn scale_over<'a>(
        &'a self,
        operand: Operand,
        x: &Tensor,
        format: Format,
        groups: impl IntoIterator<Item = &'a Group>,
    ) -> Result<Tensor> {
        let found = amax(x)?;
        let remembered = self.track(operand).history.largest();
        let amax = match remembered {
            Some(largest) => {
                self.note(operand, &found)?;
                Tensor::from(largest).f_to_device(x.device()).context("a remembered magnitude")?
            }
            None => self.maximum(operand, found, groups)?,
        };
        scale_for(&amax, format, self.settings.power_of_two)
    }

    /// The largest magnitudes of an operand over all ranks of these groups, from those of this rank.
    pub(crate) fn maximum<'a>(
        &'a self,
        operand: Operand,
        mut amax: Tensor,
        groups: impl IntoIterator<Item = &'a Group>,
    ) -> Result<Tensor> {
        // Before the others are asked: a maximum over ranks may lose a NaN, and this rank is the one to name.
        self.note(operand, &amax)?;
        for group in groups {
            amax = self.over(group, &amax)?;
        }
        Ok(amax)
    }

    fn over(&self, group: &Group, amax: &Tensor) -> Result<Tensor> {
        group.all_reduce(amax, ReduceOp::Max).map_err(|source| Error::Comm { weight: self.name(), source })
    }

    /// The ranks that hold a part of the given axes of an operand.
    pub(crate) fn groups_of(&self, axes: &[Axis]) -> impl Iterator<Item = &Group> {
        axes.iter().filter_map(|&axis| self.group_of(axis))
    }

    /// The ranks among which an axis is divided, if it is.
    fn group_of(&self, axis: Axis) -> Option<&Group> {
        let is_split = |axis: usize| {
            let layout = self.weight.layout();
            layout.splits().iter().any(|split| split.axis == axis && split.view.overlaps(View::TP))
        };
        match axis {
            Axis::Tokens => Some(&self.groups.tokens),
            Axis::Out => is_split(0).then_some(&self.groups.tp),
            Axis::In => is_split(1).then_some(&self.groups.tp),
        }
    }

    /// Takes note of an operand's magnitudes, and refuses what is not finite: at once where that costs no waiting.
    pub(crate) fn note(&self, operand: Operand, amax: &Tensor) -> Result<()> {
        let waits = amax.device() != Device::Cpu;
        if !waits && self.settings.delayed.is_none() && amax.numel() == 1 {
            return self.refuse(operand, amax.double_value(&[]));
        }
        if amax.numel() == 0 {
            return Ok(());
        }
        let largest = amax.f_max().context("the largest magnitude")?;
        if !waits {
            self.refuse(operand, largest.double_value(&[]))?;
        }
        if waits || self.settings.delayed.is_some() {
            let seen = &mut self.track(operand).seen;
            *seen = Some(match seen.take() {
                Some(before) => before.f_maximum(&largest).context("the largest magnitude")?,
                None => largest,
            });
        }
        Ok(())
    }

    pub(crate) fn refuse(&self, operand: Operand, amax: f64) -> Result<()> {
        match amax.is_finite() {
            true => Ok(()),
            false => Err(Error::NotFinite { weight: self.name(), operand, amax }),
        }
    }

    /// What was noted since it was last taken, by operand. Of projections of one input, the first has its magnitude.
    pub(crate) fn take_seen(&self) -> [Option<Tensor>; 3] {
        Operand::ALL.map(|operand| self.track(operand).seen.take())
    }

    /// Ends a step in which these were the largest magnitudes on any rank; 0 where there was none.
    pub(crate) fn remember(&self, largest: [f32; 3]) {
        for (operand, largest) in Operand::ALL.into_iter().zip(largest) {
            if largest > 0.0 {
                self.track(operand).history.push(largest);
            }
        }
    }

    pub(crate) fn history(&self) -> [Vec<f32>; 3] {
        Operand::ALL.map(|operand| self.track(operand).history.steps())
    }

    pub(crate) fn set_history(&self, steps: &[Vec<f32>; 3]) {
        for (operand, steps) in Operand::ALL.into_iter().zip(steps) {
            let mut history = History::new(self.settings.delayed.unwrap_or(0));
            steps.iter().for_each(|&largest| history.push(largest));
            self.track(operand).history = history;
        }
    }

    /// This rank's shard in the dtype that the model computes in: what is cast wherever the weight does not travel.
    pub(crate) fn as_computed(&self, shard: &Tensor) -> Result<Tensor> {
        let kind = self.weight.compute_kind().unwrap_or(shard.kind());
        shard.f_to_kind(kind).context("a weight in the dtype that the model computes in")
    }

    /// The scale in which this rank's shard travels, that of the whole weight.
    pub(crate) fn scale_to_travel(&self, shard: &Tensor, format: Format) -> Result<Tensor> {
        let own = amax(shard)?;
        self.note(Operand::Weight, &own)?;
        let ahead = self.state().ahead.as_ref().map(|(amax, scale)| (amax.shallow_clone(), scale.shallow_clone()));
        let scale = match ahead {
            Some((known, scale)) if own.device() == Device::Cpu => {
                let (found, known) = (own.double_value(&[]), known.double_value(&[]));
                if found > known {
                    return Err(Error::Stale { weight: self.name(), found, known });
                }
                scale
            }
            Some((known, scale)) => {
                // As with what is not finite: lost visibly, without waiting.
                let outgrown = own.f_gt_tensor(&known).and_then(|outgrown| scale.f_masked_fill(&outgrown, f64::NAN));
                outgrown.context("a scale")?
            }
            None => {
                let amax = self.over(&self.groups.weight, &own)?;
                scale_for(&amax, format, self.settings.power_of_two)?
            }
        };
        self.state().travelled = Some(scale.shallow_clone());
        Ok(scale)
    }

    /// The scale in which the gathered weight travelled.
    pub(crate) fn travelled(&self) -> Option<Tensor> {
        self.state().travelled.as_ref().map(Tensor::shallow_clone)
    }

    /// Keeps a scale that was computed for the whole weight, until weights change.
    pub(crate) fn set_ahead(&self, amax: Tensor, scale: Tensor) {
        self.state().ahead = Some((amax, scale));
    }

    // A panic while a lock was held cannot leave a half-written state: every write is one assignment or one push.
    fn track(&self, operand: Operand) -> MutexGuard<'_, Track> {
        self.tracks[operand as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
