//! What TorchTitan's keys ask for and this build has not: one table. A feature that was left out of the build has a row that
//! holds then; whoever adds what is not there yet deletes its row.

use super::problem::Problem;
use super::sections::CheckpointMode;
use super::{Config, renamed};

/// A key, whether its value asks for what is not there, and what that is.
type Row = (&'static str, fn(&Config) -> bool, &'static str);

const UNAVAILABLE: &[Row] = &[
    (
        "parallelism.data_parallel_replicate_degree",
        |c| cfg!(not(feature = "fsdp")) && c.parallelism.data_parallel_replicate_degree > 1,
        "data parallelism (feature `fsdp` of this build)",
    ),
    (
        "parallelism.data_parallel_shard_degree",
        |c| cfg!(not(feature = "fsdp")) && c.parallelism.data_parallel_shard_degree > 1,
        "sharding parameters (feature `fsdp` of this build)",
    ),
    (
        "parallelism.tensor_parallel_degree",
        |c| cfg!(not(feature = "tp")) && c.parallelism.tensor_parallel_degree > 1,
        "tensor parallelism (feature `tp` of this build)",
    ),
    (
        "parallelism.pipeline_parallel_degree",
        |c| cfg!(not(feature = "pp")) && c.parallelism.pipeline_parallel_degree > 1,
        "pipeline parallelism (feature `pp` of this build)",
    ),
    (
        "parallelism.context_parallel_degree",
        |c| cfg!(not(all(feature = "cp", feature = "fsdp"))) && c.parallelism.context_parallel_degree > 1,
        "context parallelism (features `cp` and `fsdp` of this build)",
    ),
    ("parallelism.expert_parallel_degree", |c| c.parallelism.expert_parallel_degree > 1, "expert parallelism"),
    (
        "parallelism.expert_tensor_parallel_degree",
        |c| c.parallelism.expert_tensor_parallel_degree > 1,
        "tensor parallelism of experts",
    ),
    (
        "model.converters",
        |c| cfg!(not(feature = "float8")) && converts(c, "quantize.linear."),
        "Float8 (feature `float8` of this build)",
    ),
    ("model.converters", |c| converts(c, "quantize.grouped_mm."), "eight bits for the experts of a mixture"),
    (
        "checkpoint.enable",
        |c| cfg!(not(feature = "checkpoint")) && c.checkpoint.enable,
        "saving and resuming (feature `checkpoint` of this build)",
    ),
    (
        "checkpoint.create_seed_checkpoint",
        |c| cfg!(not(feature = "checkpoint")) && c.checkpoint.create_seed_checkpoint,
        "saving initial weights (feature `checkpoint` of this build)",
    ),
    (
        "metrics.enable_tensorboard",
        |c| cfg!(not(feature = "telemetry")) && c.metrics.enable_tensorboard,
        "TensorBoard (feature `telemetry` of this build)",
    ),
    (
        "metrics.enable_prometheus",
        |c| cfg!(not(feature = "telemetry")) && c.metrics.enable_prometheus,
        "Prometheus (feature `telemetry` of this build)",
    ),
    (
        "metrics.enable_otlp",
        |c| cfg!(not(feature = "telemetry")) && c.metrics.enable_otlp,
        "OTLP (feature `telemetry` of this build)",
    ),
    (
        "profiling.enable_profiling",
        |c| cfg!(not(feature = "telemetry")) && c.profiling.enable_profiling,
        "tracing (feature `telemetry` of this build)",
    ),
    (
        "activation_checkpoint.mode",
        |c| c.activation_checkpoint.mode == CheckpointMode::MemoryBudget,
        "activation checkpointing by a memory budget",
    ),
    (
        "training.enable_cpu_offload",
        |c| cfg!(not(feature = "fsdp")) && c.training.enable_cpu_offload,
        "keeping parameters in CPU memory (feature `fsdp` of this build)",
    ),
    ("optimizer.early_step_in_backward", |c| c.optimizer.early_step_in_backward, "stepping inside the backward pass"),
    ("fault_tolerance.enable", |c| c.fault_tolerance.enable, "fault tolerance"),
    ("memory_estimation.enable", |c| c.memory_estimation.enable, "estimating memory"),
];

/// Whether a converter is asked for that is one of these.
fn converts(config: &Config, section: &str) -> bool {
    config.model.converters.0.iter().any(|name| renamed::current(name).starts_with(section))
}

/// Everything that the config asks for and this build has not.
pub fn unavailable(config: &Config) -> Vec<Problem> {
    let asked = UNAVAILABLE.iter().filter(|(_, asked, _)| asked(config));
    asked.map(|(key, _, what)| refusal(key, what)).collect()
}

/// The refusal of one key.
fn refusal(key: &str, what: &str) -> Problem {
    let default = Config::default().value(key).map(|value| value.to_string());
    let problem = Problem::new(&[key], format!("`{key}`: {what} is not available"));
    match key {
        // Its default takes all ranks that are left, and so is no way out.
        "parallelism.data_parallel_shard_degree" => problem.help("set it to 1"),
        "model.converters" => problem.help("leave it out of the list"),
        _ => problem.help(format!("leave it at {}", default.unwrap_or_default())),
    }
}

/// The refusal of a degree of sharding that the ranks which are left come to, if it is refused.
pub(super) fn leftover_shards(shards: usize) -> Option<Problem> {
    let mut config = Config::default();
    config.parallelism.data_parallel_shard_degree = i64::try_from(shards).unwrap_or(i64::MAX);
    let key = "parallelism.data_parallel_shard_degree";
    unavailable(&config).into_iter().find(|problem| problem.keys == [key])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::section;
    use crate::config::sections::Names;

    #[test]
    fn rows_are_about_keys_and_do_not_refuse_the_defaults() {
        for (key, asked, _) in UNAVAILABLE {
            assert!(section::find(key).is_some(), "{key} is no key");
            assert!(!asked(&Config::default()), "{key} is refused at its default");
        }
    }

    #[test]
    fn asking_for_more_is_refused_once_each() {
        let mut config = Config::default();
        config.parallelism.expert_parallel_degree = 2;
        config.memory_estimation.enable = true;
        config.model.converters = Names::of(&["quantize.grouped_mm.mx"]);
        let keys: Vec<_> = unavailable(&config).into_iter().map(|problem| problem.keys[0].clone()).collect();
        assert_eq!(keys, ["parallelism.expert_parallel_degree", "model.converters", "memory_estimation.enable"]);
    }
}
