//! The plan of a run.

use super::checkpoint::CheckpointPlan;
use super::data::{DataPlan, ValidationPlan};
use super::float8::Float8Plan;
use super::parallel::ParallelPlan;
use super::precision::Precision;
use super::telemetry::TelemetryPlan;
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
    /// What is computed again in the backward pass instead of being kept.
    pub recompute: Recompute,
    /// Which numbers it computes in.
    pub precision: Precision,
    /// Which of its products are in Float8, if any are.
    pub float8: Option<Float8Plan>,
    /// What it reads.
    pub data: DataPlan,
    /// How it is measured on other text, if it is.
    pub validation: Option<ValidationPlan>,
    /// What is saved of it, and what it starts from, if anything is.
    pub checkpoint: Option<CheckpointPlan>,
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
    /// What is exported beside that.
    pub telemetry: TelemetryPlan,
}

/// What is computed again in the backward pass instead of being kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    Nothing,
    /// Of every so many blocks one, from its input.
    Blocks {
        /// How many.
        every: usize,
    },
    /// In every block what is cheap.
    ByOperation,
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
    /// Folder for what each rank was at when the run went wrong.
    pub records: PathBuf,
    /// What the name of such a file begins with.
    pub record_prefix: String,
    /// Whether ranks that are processes compare what they are about to call.
    pub verify: bool,
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
        let backend = decide(choice, around, degrees.world_size());
        let mut checkpoint = CheckpointPlan::of(config)?;
        if checkpoint.is_none() && config.checkpoint.initial_load_path.is_some() {
            let message = "ignored: `checkpoint.enable` is false".to_owned();
            notes.push(Note { key: "checkpoint.initial_load_path".into(), message });
        }
        if backend == Backend::Fake && checkpoint.take().is_some() {
            let message = "ignored: one rank of many that are not there has nothing whole to save".to_owned();
            notes.push(Note { key: "checkpoint.enable".into(), message });
        }
        let plan = Self {
            description: config.job.description.clone(),
            degrees,
            parallel: ParallelPlan::of(config, &model)?,
            attn_mask: config.model.attn_mask_type,
            recompute: recompute(config, &mut notes),
            precision: Precision::of(config),
            float8: Float8Plan::of(config)?,
            data: DataPlan::of(config, degrees.dp_replicate * degrees.dp_shard),
            validation: ValidationPlan::of(config),
            checkpoint,
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
                backend,
                init_timeout: Duration::from_secs(config.comm.init_timeout_seconds),
                train_timeout: Duration::from_secs(config.comm.train_timeout_seconds),
                trace_buffer: config.comm.trace_buf_size,
                records: dump_folder.join(&config.comm.save_traces_folder),
                record_prefix: config.comm.save_traces_file_prefix.clone(),
                verify: config.comm.verify,
            },
            metrics: MetricsPlan {
                log_freq: config.metrics.log_freq,
                plain: config.metrics.disable_color_printing,
                peak_tflops: config.metrics.peak_tflops,
                convention,
                flops_per_token,
            },
            telemetry: TelemetryPlan::of(config)?,
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

/// Which activations are computed again.
fn recompute(config: &Config, notes: &mut Vec<Note>) -> Recompute {
    let section = &config.activation_checkpoint;
    match section.mode {
        CheckpointMode::None | CheckpointMode::MemoryBudget => Recompute::Nothing,
        CheckpointMode::Full => Recompute::Blocks { every: 1 },
        CheckpointMode::Selective if section.selective_ac_option == "op" => {
            let always = &section.per_op_sac_force_recompute_mm_shapes_by_fqns;
            if *always != Config::default().activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns {
                let message = "ignored: every second product is computed again, whatever its shape".to_owned();
                let key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns".to_owned();
                notes.push(Note { key, message });
            }
            Recompute::ByOperation
        }
        // The check has seen to it that it is a number.
        CheckpointMode::Selective => {
            section.selective_ac_option.parse().map_or(Recompute::Nothing, |every| Recompute::Blocks { every })
        }
    }
}
