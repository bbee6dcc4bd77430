//! What a run starts from: its own latest checkpoint, a given step of it, another run's, or nothing.

use anyhow::{Context as _, bail, ensure};
use ferrotitan_checkpoint::interchange::Opened;
use ferrotitan_checkpoint::interchange::hugging_face::Config as Shape;
use ferrotitan_checkpoint::{Checkpoint, Item, LoadOptions, Store, Which, load, steps};
use ferrotitan_comm::DeviceMesh;
use ferrotitan_mesh::Mesh as _;
use ferrotitan_optim::AdamW;
use serde_json::Value;

use super::items;
use super::shape::shape;
use crate::checkpoint_address::open_at;
use crate::plan::{CheckpointPlan, InitialCheckpoint, Part, Plan};
use crate::train::compose::Composition;
use crate::train::progress::Progress;

/// Loads what the plan says the run starts from, if anything, and says how far that run had come.
pub(in crate::train) fn start(
    plan: &Plan,
    mesh: &DeviceMesh,
    composition: &Composition,
    optimizer: &AdamW,
) -> anyhow::Result<Progress> {
    let Some(asked) = &plan.checkpoint else { return Ok(Progress::default()) };
    let store = Store::open(&asked.address).context("checkpoint.folder")?;
    let existing = steps(&store).context("checkpoint.folder")?;
    let run = Start { asked, shape: shape(plan), mesh, composition, optimizer };
    let progress = match (&asked.initial, asked.load_step, existing.last()) {
        (_, Some(step), _) => run.own(&store, Which::Step(step))?,
        (initial, None, Some(_)) => {
            if initial.is_some() && mesh.rank() == 0 {
                tracing::info!("going on with the run's own checkpoint; checkpoint.initial_load_path is not needed");
            }
            run.own(&store, Which::Latest)?
        }
        (Some(initial), None, None) => run.other(initial).context("checkpoint.initial_load_path")?,
        (None, None, None) => {
            if mesh.rank() == 0 {
                begun_in_vain(&store)?;
            }
            return Ok(Progress::default());
        }
    };
    if asked.saves
        && let Some(later) = existing.iter().find(|step| **step > progress.step)
    {
        bail!(
            "{store} has step {later}, later than step {} that this run starts from, and would be in its way: delete the \
             later steps, set another checkpoint.folder, or set checkpoint.load_only",
            progress.step
        );
    }
    composition.after_update()?;
    Ok(progress)
}

/// A run that starts.
struct Start<'a> {
    asked: &'a CheckpointPlan,
    shape: Shape,
    mesh: &'a DeviceMesh,
    composition: &'a Composition,
    optimizer: &'a AdamW,
}

impl Start<'_> {
    /// From a checkpoint of its own.
    fn own(&self, store: &Store, which: Which) -> anyhow::Result<Progress> {
        let checkpoint = Checkpoint::open(store, which)?;
        // Initial weights come without a run.
        let seed = checkpoint.step() == 0;
        self.resume(&checkpoint, seed, LoadOptions::default())
    }

    /// From a checkpoint of another run: ours, PyTorch's, or a Hugging Face model.
    fn other(&self, initial: &InitialCheckpoint) -> anyhow::Result<Progress> {
        let cast = LoadOptions { cast: true, exact: false };
        let opened = open_at(&initial.address, None)?;
        if initial.hugging_face && !matches!(opened, Opened::HuggingFace(_)) {
            bail!("{} holds a {opened}; leave checkpoint.initial_load_in_hf at false", initial.address);
        }
        match &opened {
            Opened::Native(checkpoint) => return self.resume(checkpoint, initial.model_only, cast),
            Opened::HuggingFace(model) => same_model(model.config(), &self.shape)?,
            _ => {}
        }
        if !initial.model_only {
            bail!("of a {opened} the model alone can be loaded; set checkpoint.initial_load_model_only");
        }
        load(&opened, items::model(self.composition, None)?, self.mesh, &cast)?;
        if self.mesh.rank() == 0 {
            tracing::info!("loaded the model of {}", initial.address);
        }
        Ok(Progress::default())
    }

    /// From where a checkpoint ends.
    fn resume(&self, checkpoint: &Checkpoint, model_only: bool, options: LoadOptions) -> anyhow::Result<Progress> {
        let Start { asked, composition, mesh, .. } = self;
        let state = checkpoint.state();
        if let Ok(found) = serde_json::from_value::<Shape>(state["model"].clone()) {
            same_model(&found, &self.shape)?;
        }
        // A model alone may have been saved in another dtype.
        let alone = state["model_only"] == Value::Bool(true);
        let options = LoadOptions { cast: options.cast || alone, ..options };
        let wants_optimizer = !model_only && asked.loads(Part::Optimizer);
        if wants_optimizer && alone {
            bail!(
                "step {} holds the model alone (checkpoint.last_save_model_only): set checkpoint.load_step to an earlier \
                 step, or checkpoint.exclude_from_loading to \"optimizer\"",
                checkpoint.step()
            );
        }
        let mut all: Vec<Item> = items::model(composition, None)?;
        if wants_optimizer {
            all.extend(items::optimizer(self.optimizer)?);
        }
        let float8 = if model_only { Vec::new() } else { items::float8_in(checkpoint, composition) };
        all.extend(float8.iter().map(|item| Item::new(&item.name, item.layout.clone(), item.tensor.shallow_clone())));
        load(checkpoint, all, mesh, &options)?;
        items::restore_float8(&float8, composition)?;
        let mut progress = match model_only {
            true => Progress::default(),
            false => {
                let found = serde_json::from_value::<Progress>(state["progress"].clone());
                found.with_context(|| format!("the progress of step {}", checkpoint.step()))?
            }
        };
        if !asked.loads(Part::LrScheduler) {
            progress.schedule = 0;
        }
        if !asked.loads(Part::Dataloader) {
            progress.cursor = Default::default();
        }
        if !asked.loads(Part::TrainState) {
            (progress.step, progress.tokens) = (0, 0);
        }
        if mesh.rank() == 0 {
            tracing::info!("loaded step {}; the next step is {}", checkpoint.step(), progress.step + 1);
            if progress.cursor != Default::default() {
                data_changed(&state["config"], &asked.config);
            }
            if progress.schedule > 0 {
                schedule_changed(&state["config"], &asked.config);
            }
        }
        Ok(progress)
    }
}

/// Warns of steps that are there and cannot be loaded: somebody may have meant the run to go on from one.
fn begun_in_vain(store: &Store) -> anyhow::Result<()> {
    let folders = store.folders("").context("checkpoint.folder")?;
    let steps: Vec<&str> = folders.iter().map(String::as_str).filter(|name| name.starts_with("step-")).collect();
    if !steps.is_empty() {
        tracing::warn!(
            "{store} has no step that was saved to its end, but parts of {}: the run starts anew, and will delete them",
            steps.join(", ")
        );
    }
    Ok(())
}

/// Refuses a model of another shape, which may have tensors of the same shapes.
fn same_model(found: &Shape, needed: &Shape) -> anyhow::Result<()> {
    let sizes = |shape: &Shape| {
        [
            ("blocks", shape.n_layers),
            ("heads", shape.n_heads),
            ("key-value heads", shape.n_kv_heads),
            ("tied embeddings", usize::from(shape.tied_embeddings)),
        ]
    };
    for ((name, found), (_, needed)) in sizes(found).into_iter().zip(sizes(needed)) {
        ensure!(found == needed, "the checkpoint's model has {name} {found}, and the config's {needed}");
    }
    let rope = |shape: &Shape| (shape.rope_theta, shape.rope_scaling, shape.norm_eps);
    if rope(found) != rope(needed) {
        let (found, needed) = (rope(found), rope(needed));
        tracing::warn!("the rotary base, its scaling and the norm's epsilon were {found:?} and are {needed:?}");
    }
    Ok(())
}

/// Warns when the learning rate would not have been what it was.
fn schedule_changed(before: &Value, now: &Value) {
    let steps = |config: &Value| match &config["lr_scheduler"]["total_steps"] {
        Value::Null => config["training"]["steps"].clone(),
        total => total.clone(),
    };
    let (before, now) = (steps(before), steps(now));
    if before != now {
        tracing::warn!(
            "the learning-rate schedule was of {before} steps and is of {now}: lr_scheduler.total_steps, the same in all \
             parts of a run, keeps it"
        );
    }
}

/// Warns when the place in the data is of other data.
fn data_changed(before: &Value, now: &Value) {
    let keys = [
        ["training", "dataset"],
        ["training", "dataset_path"],
        ["training", "dataset_text_field"],
        ["training", "dataset_max_bytes"],
        ["training", "seq_len"],
        ["model", "tokenizer_path"],
        ["debug", "seed"],
    ];
    for [section, key] in keys {
        let (before, now) = (&before[section][key], &now[section][key]);
        if before != now {
            tracing::warn!(
                "{section}.{key} was {before} and is {now}: the run goes on at the same sample number of other data"
            );
        }
    }
}
