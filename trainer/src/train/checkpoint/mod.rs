//! Saving and resuming a run: what is saved, what a run starts from, and when.
//!
//! A checkpoint holds the model's parameters under their names, the optimizer's moments as `optimizer.exp_avg.NAME`,
//! `optimizer.exp_avg_sq.NAME` and `optimizer.step.NAME`, the magnitudes that delayed scaling remembers as
//! `float8.amax.OPERAND.NAME`, and [`Progress`], which says nothing of ranks.

mod export;
mod items;
mod shape;
mod start;

use anyhow::Context as _;
use ferrotitan_checkpoint::interchange::hugging_face::Config as Shape;
use ferrotitan_checkpoint::{Item, Mode, SaveOptions, Saver, Stats, Store, save};
use ferrotitan_comm::DeviceMesh;
use ferrotitan_mesh::Mesh as _;
use ferrotitan_optim::AdamW;
use serde_json::{Value, json};

use super::compose::Composition;
use super::progress::Progress;
use crate::plan::{CheckpointPlan, LastCheckpoint, Plan};

pub(super) use start::start;

/// Times of a save, by name, in seconds.
pub(super) type Times = [(String, f64); 3];

fn times(stats: Stats) -> Times {
    let seconds = [("stall", stats.stall), ("copy", stats.copy), ("write", stats.write)];
    seconds.map(|(name, time)| (format!("checkpoint_{name}_seconds"), time.as_secs_f64()))
}

/// What saves a run. Every rank has one, and all call it alike.
#[derive(Debug)]
pub(super) struct Checkpoints {
    plan: CheckpointPlan,
    shape: Shape,
    store: Store,
    saver: Saver,
    mesh: DeviceMesh,
    last_step: u64,
}

impl Checkpoints {
    /// For a run that saves.
    pub(super) fn of(plan: &Plan, mesh: &DeviceMesh) -> anyhow::Result<Option<Self>> {
        let Some(asked) = plan.checkpoint.as_ref().filter(|asked| asked.saves) else { return Ok(None) };
        let store = Store::open(&asked.address).context("checkpoint.folder")?;
        let mode = if asked.asynchronous { Mode::Async } else { Mode::Sync };
        let options = SaveOptions { mode, keep_latest_k: asked.keep, ..SaveOptions::default() };
        let saver = Saver::new(store.clone(), mesh.clone(), options);
        Ok(Some(Self {
            plan: asked.clone(),
            shape: shape::shape(plan),
            store,
            saver,
            mesh: mesh.clone(),
            last_step: plan.steps,
        }))
    }

    /// Saves the step that was just taken, if it is to be saved. Gives the times, in seconds, of the save that it has seen
    /// the end of: this one, or the one before.
    pub(super) fn after_step(
        &mut self,
        progress: &Progress,
        composition: &Composition,
        optimizer: &AdamW,
    ) -> anyhow::Result<Option<Times>> {
        let step = progress.step;
        let last = step == self.last_step;
        if !(last || step.is_multiple_of(self.plan.every) || (step == 1 && self.plan.first_step)) {
            return Ok(None);
        }
        match self.plan.last {
            LastCheckpoint::Model(dtype) if last => {
                let items = items::model(composition, Some(dtype.kind()))?;
                self.save(progress, items, true)
            }
            LastCheckpoint::HuggingFace(dtype) if last => {
                let model = items::model(composition, None)?;
                export::hugging_face(&self.store, &self.mesh, &self.shape, step, model, dtype)?;
                Ok(None)
            }
            _ => {
                let mut items = items::model(composition, None)?;
                items.extend(items::optimizer(optimizer)?);
                items.extend(items::float8(composition)?);
                self.save(progress, items, false)
            }
        }
    }

    fn save(&mut self, progress: &Progress, items: Vec<Item>, model_only: bool) -> anyhow::Result<Option<Times>> {
        let state = state(progress, model_only, &self.plan, &self.shape)?;
        let done = self.saver.save(progress.step, items, state).context("saving a checkpoint")?;
        tell(&self.mesh, done);
        Ok(done.map(times))
    }

    /// Waits for what is being written.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        let Self { saver, mesh, .. } = self;
        let done = saver.finish().context("saving a checkpoint")?;
        tell(&mesh, done);
        Ok(())
    }
}

/// Saves initial weights, from which a run on any mesh can start.
pub(super) fn save_seed(
    plan: &Plan,
    asked: &CheckpointPlan,
    mesh: &DeviceMesh,
    composition: &Composition,
) -> anyhow::Result<()> {
    let store = Store::open(&asked.address).context("checkpoint.folder")?;
    let state = state(&Progress::default(), true, asked, &shape::shape(plan))?;
    let done = save(&store, mesh, 0, items::model(composition, None)?, state).context("saving initial weights")?;
    tell(mesh, Some(done));
    Ok(())
}

/// What a checkpoint holds beside tensors.
fn state(progress: &Progress, model_only: bool, plan: &CheckpointPlan, shape: &Shape) -> anyhow::Result<Value> {
    let model = serde_json::to_value(shape)?;
    Ok(json!({ "progress": progress, "model_only": model_only, "model": model, "config": plan.config }))
}

fn tell(mesh: &DeviceMesh, done: Option<Stats>) {
    let Some(stats) = done.filter(|_| mesh.rank() == 0) else { return };
    let (step, bytes) = (stats.step, stats.bytes);
    let seconds = |duration: std::time::Duration| (duration.as_secs_f64() * 1e3).round() / 1e3;
    tracing::info!(
        "checkpoint of step {step}: {bytes} bytes by this rank, written in {} s; training stood still for {} s",
        seconds(stats.write + stats.commit),
        seconds(stats.stall),
    );
}
