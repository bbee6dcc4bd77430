//! The config: TOML with TorchTitan 0.2's names, and the command line over it.
//!
//! [`Loaded::load`] reads a file and the overrides into a [`Config`] and collects every mistake on the way;
//! [`check`](check::check) finds what does not fit together; [`Plan::new`](crate::plan::Plan::new) turns what is left into
//! what it means. Nothing after that reads the config.

mod available;
pub mod check;
mod check_values;
mod flags;
mod ignored;
mod load;
mod nearest;
mod problem;
mod read;
mod renamed;
mod report;
pub mod section;
pub mod sections;
mod shape;
mod show;
pub(crate) mod tree;

pub use available::unavailable;
pub use flags::{Flag, split};
pub use ignored::ignored;
pub use load::{LoadError, Loaded};
pub use nearest::nearest;
pub use problem::{Note, Origin, Problem};
pub(crate) use renamed::current as current_name;
pub use report::Reporter;
pub use shape::shape;
pub use show::show;

use section::section;
use sections::{
    ActivationCheckpoint, Checkpoint, Comm, Compile, Debug, Experimental, FaultTolerance, Job, LrScheduler,
    MemoryEstimation, Metrics, Model, Optimizer, Parallelism, Profiling, Quantize, Training, Validation,
};

section! {
    /// The complete config, as written: see the sections for every key, its default and its meaning.
    pub struct Config {
        /// The run as a whole.
        pub job: Job,
        /// Traces of single steps.
        pub profiling: Profiling,
        /// What is told of the steps.
        pub metrics: Metrics,
        /// Which model is trained, with which tokenizer.
        pub model: Model,
        /// How gradients become steps.
        pub optimizer: Optimizer,
        /// Warm-up, a stable phase, decay.
        pub lr_scheduler: LrScheduler,
        /// What is read, in which batches, for how long, in which precision.
        pub training: Training,
        /// The degrees of the mesh, whose product is the number of ranks.
        pub parallelism: Parallelism,
        /// What is saved of a run, and what a run starts from.
        pub checkpoint: Checkpoint,
        /// Which activations are computed again in the backward pass.
        pub activation_checkpoint: ActivationCheckpoint,
        /// TorchTitan: `torch.compile`.
        pub compile: Compile,
        /// Products in fewer bits.
        pub quantize: Quantize,
        /// How ranks talk.
        pub comm: Comm,
        /// How much memory a run would take.
        pub memory_estimation: MemoryEstimation,
        /// Replicas that come and go while the run goes on.
        pub fault_tolerance: FaultTolerance,
        /// TorchTitan: extension by Python modules.
        pub experimental: Experimental,
        /// The loss on text that is not trained on.
        pub validation: Validation,
        /// Seeds and determinism.
        pub debug: Debug,
    }
}

impl Config {
    /// The value of a key by its dotted path; `None` where there is no such key, or where it is not set.
    pub fn value(&self, path: &str) -> Option<serde_json::Value> {
        let mut value = serde_json::to_value(self).ok()?;
        for name in path.split('.') {
            value = value.get_mut(name)?.take();
        }
        (!value.is_null()).then_some(value)
    }
}
