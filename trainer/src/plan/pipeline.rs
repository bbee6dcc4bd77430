//! The pipeline: which layers each stage has, and the order of their passes, proven sound.

use ferrotitan_nn::llama::LlamaConfig;
use ferrotitan_pp::{Partition, Split};
use ferrotitan_schedule::{Algorithm, Costs, Schedule, verify};

use crate::config::{Config, Problem};

/// What the pipeline ranks do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelinePlan {
    /// The layers of each stage.
    pub partition: Partition,
    /// The order of the passes.
    pub schedule: Schedule,
}

const SCHEDULE: &str = "parallelism.pipeline_parallel_schedule";
const CSV: &str = "parallelism.pipeline_parallel_schedule_csv";
const MICROBATCH: &str = "parallelism.pipeline_parallel_microbatch_size";

/// The most ranks, blocks and microbatches of a pipeline.
const LARGEST: usize = 4096;

impl PipelinePlan {
    /// The pipeline of a config with more than one stage rank; `None` for one.
    ///
    /// # Errors
    /// When the batch cannot be cut as asked, there is no such schedule, it is unsound or for other numbers, or the model
    /// cannot be cut into its stages.
    pub(crate) fn of(config: &Config, model: &LlamaConfig) -> Result<Option<Self>, Vec<Problem>> {
        let ranks = config.parallelism.pipeline_parallel_degree;
        if ranks <= 1 {
            return Ok(None);
        }
        let microbatches = microbatches(config)?;
        // A schedule lists every pass of every stage: numbers that no run has are refused before it is written out.
        let sizes = [
            (MICROBATCH, "microbatches", microbatches),
            ("parallelism.pipeline_parallel_degree", "pipeline ranks", ranks),
            ("model.n_layers", "blocks", model.n_layers),
        ];
        for (key, what, size) in sizes {
            if size > LARGEST {
                let message = format!("{size} {what} are more than a pipeline takes: at most {LARGEST}");
                return Err(vec![Problem::new(&[key], message)]);
            }
        }
        if ranks > model.n_layers + 3 {
            let message =
                format!("{ranks} pipeline ranks are more than the layers of the model, {}", model.n_layers + 3);
            return Err(vec![Problem::new(&["parallelism.pipeline_parallel_degree", "model.n_layers"], message)]);
        }
        let blocks = (0..model.n_layers).map(|block| format!("layers.{block}"));
        let ends = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let layers: Vec<String> =
            ends(&["tok_embeddings"]).into_iter().chain(blocks).chain(ends(&["norm", "output"])).collect();
        let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
        let parallelism = &config.parallelism;
        let split = Split {
            first_stage_less_layers: parallelism.pipeline_parallel_first_stage_less_layers,
            last_stage_less_layers: parallelism.pipeline_parallel_last_stage_less_layers,
            layers_per_stage: parallelism.pipeline_parallel_layers_per_stage,
            module_fqns_per_model_part: parallelism.module_fqns_per_model_part.clone(),
        };
        let schedule = match parallelism.pipeline_parallel_schedule_csv.as_str() {
            "" => named(&parallelism.pipeline_parallel_schedule, &split, &layers, ranks, microbatches)?,
            path => read(path, ranks, microbatches)?,
        };
        let partition = Partition::new(&layers, &split, &schedule).map_err(|error| problem(SCHEDULE, &error))?;
        Ok(Some(Self { partition, schedule }))
    }
}

/// Microbatches of a pass, which must come out even for training and for validation.
fn microbatches(config: &Config) -> Result<usize, Vec<Problem>> {
    let size = config.parallelism.pipeline_parallel_microbatch_size as u64;
    let batch = config.training.local_batch_size;
    if size == 0 || !batch.is_multiple_of(size) {
        let message = format!("microbatches of {size} do not divide a local batch of {batch}");
        return Err(vec![Problem::new(&[MICROBATCH, "training.local_batch_size"], message)]);
    }
    let count = batch / size;
    let validation = &config.validation;
    if validation.enable && !validation.local_batch_size.is_multiple_of(count) {
        let keys = ["validation.local_batch_size", MICROBATCH];
        let message = format!(
            "the {count} microbatches of a pass do not divide a local batch of {}",
            validation.local_batch_size
        );
        return Err(vec![Problem::new(&keys, message).help(format!("set it to a multiple of {count}"))]);
    }
    Ok(usize::try_from(count).unwrap_or(usize::MAX))
}

fn named(
    name: &str,
    split: &Split,
    layers: &[&str],
    ranks: usize,
    microbatches: usize,
) -> Result<Schedule, Vec<Problem>> {
    let algorithm: Algorithm = name.parse().map_err(|error| problem(SCHEDULE, &error))?;
    let stages = split.stages_per_rank(layers, algorithm, ranks).map_err(|error| problem(SCHEDULE, &error))?;
    algorithm.generate(ranks, stages, microbatches).map_err(|error| problem(SCHEDULE, &error))
}

fn read(path: &str, ranks: usize, microbatches: usize) -> Result<Schedule, Vec<Problem>> {
    let text = std::fs::read_to_string(path).map_err(|error| problem(CSV, &error))?;
    let schedule = Schedule::from_csv(path, &text).map_err(|error| problem(CSV, &error))?;
    let found = (schedule.ranks.len(), schedule.microbatches);
    if found != (ranks, microbatches) {
        let message = format!(
            "{path} is for {} ranks and {} microbatches, and there are {ranks} and {microbatches}",
            found.0, found.1
        );
        return Err(vec![Problem::new(&[CSV, "parallelism.pipeline_parallel_degree", MICROBATCH], message)]);
    }
    verify(&schedule, &Costs::default()).map_err(|error| problem(CSV, &error))?;
    Ok(schedule)
}

fn problem(key: &str, error: &dyn std::error::Error) -> Vec<Problem> {
    vec![Problem::new(&[key], error.to_string())]
}
