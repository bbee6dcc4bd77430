//! Keys of TorchTitan that change nothing here: they are read, and reported once where they are set to something.

use super::Config;
use super::problem::Note;

/// A key or a section, and why it changes nothing.
const IGNORED: &[(&str, &str)] = &[
    ("job.custom_config_module", "there are no Python modules to import"),
    ("job.use_for_integration_test", "it is for TorchTitan's own tests"),
    ("profiling.profiler_warmup", "tracing needs no warm-up"),
    ("profiling.enable_memory_snapshot", "this build writes no memory snapshots"),
    ("metrics.enable_wandb", "no library writes its format; TensorBoard's files can be imported there"),
    ("model.print_after_conversion", "the log says which projections are converted"),
    ("optimizer.implementation", "the optimizer is the fused kernel always"),
    ("training.gc_freq", "there is no garbage collector"),
    ("training.gc_debug", "there is no garbage collector"),
    ("training.dataloader", "the loader has one thread that reads ahead"),
    ("parallelism.enable_compiled_autograd", "nothing is compiled"),
    ("compile.enable", "nothing is compiled"),
    ("quantize.linear.float8.force_recompute_fp8_weight_in_bwd", "a weight in eight bits is never kept"),
    ("quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", "there is one kernel"),
    ("debug.deterministic_warn_only", "`debug.deterministic` reports operations that have no deterministic kernel"),
    ("debug.moe_force_load_balance", "the models have no experts"),
    ("activation_checkpoint.preserve_rng_state", "no layer draws random numbers"),
    ("activation_checkpoint.debug", "recomputation is not recorded"),
    ("activation_checkpoint.visualize_memory_budget_pareto", "there is no memory budget"),
    ("experimental.custom_import", "there are no Python modules to import"),
    ("validation.dataloader", "the loader has one thread that reads ahead"),
];

/// What the config sets to no effect. Only values other than the default count.
pub fn ignored(config: &Config) -> Vec<Note> {
    let default = Config::default();
    let set = IGNORED.iter().filter(|(key, _)| config.value(key) != default.value(key));
    set.map(|(key, why)| Note { key: (*key).to_owned(), message: format!("ignored: {why}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::section;

    #[test]
    fn rows_are_about_keys() {
        for (key, _) in IGNORED {
            assert!(section::find(key).is_some(), "{key} is no key");
        }
    }

    #[test]
    fn only_what_is_set_is_reported() {
        let mut config = Config::default();
        assert_eq!(ignored(&config), []);
        config.training.gc_freq = 10;
        config.training.dataloader.num_workers = 4;
        let keys: Vec<_> = ignored(&config).into_iter().map(|note| note.key).collect();
        assert_eq!(keys, ["training.gc_freq", "training.dataloader"]);
    }
}
