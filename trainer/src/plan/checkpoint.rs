//! What is saved of a run, and what it starts from.

use super::precision::Dtype;
use crate::config::sections::{AsyncMode, ExportDtype};
use crate::config::{Config, Problem};
use std::path::Path;

/// What is saved of a run, and what it starts from.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointPlan {
    /// Where a run's checkpoints are: a folder, or an object store's URL.
    pub address: String,
    /// Whether it saves, or only loads.
    pub saves: bool,
    /// Steps from one checkpoint to the next. The last step is saved always.
    pub every: u64,
    /// The first step is saved too.
    pub first_step: bool,
    /// Initial weights are saved, and nothing is trained.
    pub seed_only: bool,
    /// Writing goes on while the next steps are computed.
    pub asynchronous: bool,
    /// Checkpoints that are kept; 0: all.
    pub keep: usize,
    /// What the last one is.
    pub last: LastCheckpoint,
    /// The step that is loaded; `None`: the latest.
    pub load_step: Option<u64>,
    /// What is not loaded.
    pub exclude: Vec<Part>,
    /// What a run starts from whose own folder has no checkpoint.
    pub initial: Option<InitialCheckpoint>,
    /// The complete config, which each checkpoint keeps.
    pub config: serde_json::Value,
}

/// What the checkpoint of the last step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastCheckpoint {
    /// Like the others: the run can be resumed from it.
    Whole,
    /// The model alone, in this dtype.
    Model(ModelDtype),
    /// The model alone, in Hugging Face's format.
    HuggingFace(ModelDtype),
}

/// What a model is saved in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelDtype {
    /// IEEE half precision.
    Float16,
    /// One that a run can compute in.
    Of(Dtype),
}

impl ModelDtype {
    /// libtorch's name of it.
    pub fn kind(self) -> tch::Kind {
        match self {
            Self::Float16 => tch::Kind::Half,
            Self::Of(dtype) => dtype.kind(),
        }
    }
}

/// A checkpoint of another run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitialCheckpoint {
    /// Where it is: a folder, or an object store's URL.
    pub address: String,
    /// Without the optimizer, the place in the data, and the step.
    pub model_only: bool,
    /// It is in Hugging Face's format.
    pub hugging_face: bool,
}

/// A part of a checkpoint beside the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The optimizer's moments.
    Optimizer,
    /// The place in the learning-rate schedule.
    LrScheduler,
    /// The place in the data.
    Dataloader,
    /// The step, and the tokens seen.
    TrainState,
}

impl Part {
    /// All of them, by TorchTitan's names.
    const NAMES: [(&str, Self); 4] = [
        ("optimizer", Self::Optimizer),
        ("lr_scheduler", Self::LrScheduler),
        ("dataloader", Self::Dataloader),
        ("train_state", Self::TrainState),
    ];
}

impl CheckpointPlan {
    /// What the config asks for, if it does.
    ///
    /// # Errors
    /// With everything that is wrong with it.
    pub(crate) fn of(config: &Config) -> Result<Option<Self>, Vec<Problem>> {
        let asked = &config.checkpoint;
        if !(asked.enable || asked.create_seed_checkpoint) {
            return Ok(None);
        }
        let mut problems = Vec::new();
        let mut wrong = |keys: &[&str], message: String, help: &str| {
            problems.push(Problem::new(keys, message).help(help));
        };
        if asked.interval == 0 {
            let message = "`checkpoint.interval` is 0, and must be at least 1".to_owned();
            wrong(&["checkpoint.interval"], message, "the last step is saved in any case");
        }
        if asked.load_step < -1 {
            let message = format!("`checkpoint.load_step` is {}, and must be a step, or -1", asked.load_step);
            wrong(&["checkpoint.load_step"], message, "-1 loads the latest");
        }
        if asked.load_only && asked.create_seed_checkpoint {
            let message = "a run that only loads cannot save its initial weights".to_owned();
            let keys = ["checkpoint.load_only", "checkpoint.create_seed_checkpoint"];
            wrong(&keys, message, "leave one of them at false");
        }
        if asked.last_save_in_hf && !asked.last_save_model_only {
            let message = "a checkpoint in Hugging Face's format holds the model alone".to_owned();
            let keys = ["checkpoint.last_save_in_hf", "checkpoint.last_save_model_only"];
            wrong(&keys, message, "set `checkpoint.last_save_model_only` to true");
        }
        if asked.initial_load_in_hf && !asked.initial_load_model_only {
            let message = "a model in Hugging Face's format has no optimizer to load".to_owned();
            let keys = ["checkpoint.initial_load_in_hf", "checkpoint.initial_load_model_only"];
            wrong(&keys, message, "set `checkpoint.initial_load_model_only` to true");
        }
        if asked.initial_load_in_hf_quantized {
            let message = "quantized models cannot be loaded".to_owned();
            wrong(&["checkpoint.initial_load_in_hf_quantized"], message, "load the model that was quantized");
        }
        let mut exclude = Vec::new();
        for name in &asked.exclude_from_loading.0 {
            match Part::NAMES.iter().find(|(known, _)| known == name) {
                Some((_, part)) => exclude.push(*part),
                None => {
                    let names = Part::NAMES.map(|(name, _)| name).join(", ");
                    let message = format!("there is no part `{name}` of a checkpoint that could be left out");
                    wrong(&["checkpoint.exclude_from_loading"], message, &format!("the parts are {names}"));
                }
            }
        }
        let assets = config.model.hf_assets_path.as_ref().filter(|_| asked.initial_load_in_hf);
        let initial = asked.initial_load_path.as_ref().or(assets);
        if initial.is_none() && asked.initial_load_in_hf {
            let message = "`checkpoint.initial_load_in_hf` says how, and nothing says what to load".to_owned();
            let keys = ["checkpoint.initial_load_in_hf", "checkpoint.initial_load_path"];
            wrong(&keys, message, "set `checkpoint.initial_load_path` to the folder of the model");
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let dtype = match asked.export_dtype {
            ExportDtype::Float16 => ModelDtype::Float16,
            ExportDtype::BFloat16 => ModelDtype::Of(Dtype::BFloat16),
            ExportDtype::Float32 => ModelDtype::Of(Dtype::Float32),
        };
        let keep = usize::try_from(asked.keep_latest_k).unwrap_or(usize::MAX);
        Ok(Some(Self {
            address: address(&config.job.dump_folder, &asked.folder),
            saves: !asked.load_only,
            every: asked.interval,
            first_step: asked.enable_first_step_checkpoint,
            seed_only: asked.create_seed_checkpoint,
            asynchronous: asked.async_mode != AsyncMode::Disabled,
            keep,
            last: match (asked.last_save_model_only, asked.last_save_in_hf) {
                (false, _) => LastCheckpoint::Whole,
                (true, false) => LastCheckpoint::Model(dtype),
                (true, true) => LastCheckpoint::HuggingFace(dtype),
            },
            load_step: u64::try_from(asked.load_step).ok(),
            exclude,
            initial: initial.map(|address| InitialCheckpoint {
                address: address.clone(),
                model_only: asked.initial_load_model_only,
                hugging_face: asked.initial_load_in_hf,
            }),
            config: serde_json::to_value(config).unwrap_or_default(),
        }))
    }

    /// Whether a part is loaded.
    pub fn loads(&self, part: Part) -> bool {
        !self.exclude.contains(&part)
    }
}

/// A folder below the run's, unless it says itself where it is.
fn address(dump_folder: &str, folder: &str) -> String {
    if folder.contains("://") {
        return folder.to_owned();
    }
    // An absolute path replaces what it is joined to.
    Path::new(dump_folder).join(folder).to_string_lossy().into_owned()
}
