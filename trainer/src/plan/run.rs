//! The plan of a run.

use super::data::{DataPlan, ValidationPlan};
use super::parallel::ParallelPlan;
use super::precision::{Float8Plan, Precision};
use crate::config::check::{self, Surroundings};
use crate::config::sections::{AttnMask, BackendChoice, CheckpointMode, DecayType, MfuConvention};
use crate::config::{Config, Note, Problem, shape};
use ferrotitan_mesh::Degrees;
use ferrotitan_nn::llama::LlamaConfig;
use std::path::PathBuf;
use std::time::Duration;

/// Everything that a run does.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// One line about the run.
    pub description: String,
    /// Folder for everything that the run writes.
    pub dump_folder: PathBuf,
    /// The mesh.
    pub degrees: Degrees,
    /// How each of its dimensions works.
    pub parallel: ParallelPlan,
    /// The shape of the model.
    pub model: LlamaConfig,
    /// What a token attends to.
    pub attn_mask: AttnMask,
    /// Every so many blocks, one is computed again in the backward pass instead of keeping its activations; `None`: none.
    pub recompute_every: Option<usize>,
    /// Which numbers it computes in.
    pub precision: Precision,
    /// Which of its products are in Float8, if any are.
    pub float8: Option<Float8Plan>,
    /// What it reads.
    pub data: DataPlan,
    /// How it is measured on other text, if it is.
    pub validation: Option<ValidationPlan>,
    /// Steps.
    pub steps: u64,
    /// How gradients become steps.
    pub optimizer: OptimizerPlan,
    /// The learning rate over the steps.
    pub schedule: SchedulePlan,
    /// Gradients whose global norm is larger are scaled down to it.
    pub max_norm: Option<f64>,
    /// Seed of initial weights and of the order of the data.
    pub seed: u64,
    /// Deterministic kernels alone.
    pub deterministic: bool,
    /// How ranks talk.
    pub comm: CommPlan,
    /// What is told of the steps.
    pub metrics: MetricsPlan,
}

/// AdamW's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerPlan {
    /// The learning rate that the schedule scales.
    pub lr: f64,
    /// Decays of the running means of the gradients and of their squares.
    pub betas: (f64, f64),
    /// Added to the root of the second mean.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The learning rate over the steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulePlan {
    /// Steps of the schedule.
    pub steps: u64,
    /// Steps of the warm-up, at most all of them.
    pub warmup: u64,
    /// Part of the steps that the decay takes; `None`: all after the warm-up.
    pub decay_ratio: Option<f64>,
    /// The curve of the decay.
    pub decay: DecayType,
    /// Where it ends, as a part of the learning rate.
    pub floor: f64,
}

/// What a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// A thread of this process.
    Threads,
    /// A process.
    Processes,
    /// One of many that are not there.
    Fake,
}

/// How ranks talk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommPlan {
    /// What a rank is.
    pub backend: Backend,
    /// How long ranks wait for each other to connect.
    pub init_timeout: Duration,
    /// How long a collective may take, or `init_timeout` if that is longer.
    pub train_timeout: Duration,
    /// Collectives that the recorder remembers.
    pub trace_buffer: usize,
}

/// What is told of the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricsPlan {
    /// Steps from one console line to the next.
    pub log_freq: u64,
    /// No color, wherever the console is.
    pub plain: bool,
    /// Peak of one device, in TFLOP/s; `None`: from its name.
    pub peak_tflops: Option<f64>,
    /// How attention counts.
    pub convention: MfuConvention,
    /// FLOPs of a token, forward and backward, by that convention.
    pub flops_per_token: f64,
}

impl Plan {
    /// What a config means in these surroundings, and what to know of it.
    ///
    /// # Errors
    /// With everything that is wrong with it.
    pub fn new(config: &Config, around: &Surroundings) -> Result<(Self, Vec<Note>), Vec<Problem>> {
        let problems = check::check(config, around);
        if !problems.is_empty() {
            return Err(problems);
        }
        let degrees = check::degrees(config, around).map_err(|problem| vec![problem])?;
        let model = shape(config)?;
        let choice = check::backend_choice(config).map_err(|problem| vec![problem])?;
        let mut notes = Vec::new();

        let training = &config.training;
        let steps = config.lr_scheduler.total_steps.unwrap_or(training.steps);
        let warmup = config.lr_scheduler.warmup_steps.min(steps);
        if warmup < config.lr_scheduler.warmup_steps {
            let message = format!("the schedule has {steps} steps, and all of them are warm-up");
            notes.push(Note { key: "lr_scheduler.warmup_steps".into(), message });
        }
        let seq_len = training.seq_len as usize;
        let convention = config.metrics.mfu_convention;
        let flops_per_token = match convention {
            MfuConvention::Full => model.flops_per_token(seq_len),
            MfuConvention::Causal => model.flops_per_token_causal(seq_len),
        };
        let dump_folder = PathBuf::from(&config.job.dump_folder);
        let plan = Self {
            description: config.job.description.clone(),
            degrees,
            parallel: ParallelPlan::of(config, &model)?,
            attn_mask: config.model.attn_mask_type,
            recompute_every: recompute_every(config, &mut notes),
            precision: Precision::of(config),
            float8: Float8Plan::of(config),
            data: DataPlan::of(config, degrees.dp_replicate * degrees.dp_shard),
            validation: ValidationPlan::of(config),
            steps: training.steps,
            optimizer: OptimizerPlan {
                lr: config.optimizer.lr,
                betas: (config.optimizer.beta1, config.optimizer.beta2),
                eps: config.optimizer.eps,
                weight_decay: config.optimizer.weight_decay,
            },
            schedule: SchedulePlan {
                steps,
                warmup,
                decay_ratio: config.lr_scheduler.decay_ratio,
                decay: config.lr_scheduler.decay_type,
                floor: config.lr_scheduler.min_lr_factor,
            },
            max_norm: (training.max_norm > 0.0).then_some(training.max_norm),
            seed: config.debug.seed.unwrap_or(0),
            deterministic: config.debug.deterministic,
            comm: CommPlan {
                backend: decide(choice, around, degrees.world_size()),
                init_timeout: Duration::from_secs(config.comm.init_timeout_seconds),
                train_timeout: Duration::from_secs(config.comm.train_timeout_seconds),
                trace_buffer: config.comm.trace_buf_size,
            },
            metrics: MetricsPlan {
                log_freq: config.metrics.log_freq,
                plain: config.metrics.disable_color_printing,
                peak_tflops: config.metrics.peak_tflops,
                convention,
                flops_per_token,
            },
            model,
            dump_folder,
        };
        Ok((plan, notes))
    }
}

/// What "auto" comes to: threads where the mesh is of CPUs on one machine, since exchanging tensors in memory costs a
/// small part of what sockets cost.
fn decide(choice: BackendChoice, around: &Surroundings, ranks: usize) -> Backend {
    match choice {
        BackendChoice::Threads => Backend::Threads,
        BackendChoice::Processes => Backend::Processes,
        BackendChoice::Fake => Backend::Fake,
        BackendChoice::Auto if ranks == 1 => Backend::Threads,
        BackendChoice::Auto if around.separate || around.nodes > 1 || around.cuda_devices > 0 => Backend::Processes,
        BackendChoice::Auto => Backend::Threads,
    }
}

/// Which blocks are computed again. Operations cannot be chosen one by one yet, which costs memory and changes no number.
fn recompute_every(config: &Config, notes: &mut Vec<Note>) -> Option<usize> {
    let option = &config.activation_checkpoint.selective_ac_option;
    match config.activation_checkpoint.mode {
        CheckpointMode::None | CheckpointMode::MemoryBudget => None,
        CheckpointMode::Full => Some(1),
        CheckpointMode::Selective if option == "op" => {
            let message = "choosing by operation is not yet available; activations are kept".to_owned();
            notes.push(Note { key: "activation_checkpoint.selective_ac_option".into(), message });
            None
        }
        CheckpointMode::Selective => option.parse().ok(),
    }
}
