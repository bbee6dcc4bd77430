//! `[activation_checkpoint]`, `[compile]`, `[memory_estimation]` and `[debug]`: how a step is computed.

use super::{Names, words};
use crate::config::section::section;

section! {
    /// `[activation_checkpoint]`: which activations are computed again in the backward pass instead of being kept.
    pub struct ActivationCheckpoint {
        /// "none", "full" (keep the input of each block alone), "selective", or "memory_budget".
        pub mode: CheckpointMode = CheckpointMode::Selective,
        /// With "selective": "op" chooses by operation, a number n takes every n-th block whole.
        pub selective_ac_option: String = "2".into(),
        /// With "op": products of the shapes of these modules are always computed again.
        pub per_op_sac_force_recompute_mm_shapes_by_fqns: Names = Names::of(&["moe.router.gate"]),
        /// Stop computing again as soon as all that was dropped is back.
        pub early_stop: bool = false,
        /// With "memory_budget": 0 keeps the least, 1 the most.
        pub memory_budget: f64 = 0.5,
        /// TorchTitan: draw time against memory over all budgets.
        pub visualize_memory_budget_pareto: bool = false,
        /// TorchTitan: restore the state of the random generator.
        pub preserve_rng_state: bool = false,
        /// TorchTitan: how recomputed tensors are compared.
        pub determinism_check: String = "default".into(),
        /// TorchTitan: record what recomputation does.
        pub debug: bool = false,
    }
}

words! {
    /// Which activations are computed again.
    pub enum CheckpointMode {
        /// Some of them.
        Selective = "selective",
        /// All but the input of each block.
        Full = "full",
        /// As many as a budget asks for.
        MemoryBudget = "memory_budget",
        /// None.
        None = "none",
    }
}

section! {
    /// `[compile]`: TorchTitan's use of `torch.compile`.
    pub struct Compile {
        /// TorchTitan: compile the components.
        pub enable: bool = false,
        /// TorchTitan: what is compiled.
        pub components: Names = Names::of(&["model", "loss"]),
        /// TorchTitan: the compiler.
        pub backend: String = "inductor".into(),
    }
}

section! {
    /// `[memory_estimation]`: how much memory a run would take.
    pub struct MemoryEstimation {
        /// Estimate instead of training.
        pub enable: bool = false,
        /// TorchTitan: estimate with real tensors.
        pub disable_fake_mode: bool = false,
    }
}

section! {
    /// `[debug]`: seeds and determinism.
    pub struct Debug {
        /// Seed of initial weights and of the order of the data. Not set: 0.
        pub seed: Option<u64> = None,
        /// Let libtorch use deterministic kernels alone.
        pub deterministic: bool = false,
        /// … and warn where an operation has none, instead of stopping.
        pub deterministic_warn_only: bool = false,
        /// TorchTitan: give each expert the same number of tokens.
        pub moe_force_load_balance: bool = false,
    }
}
