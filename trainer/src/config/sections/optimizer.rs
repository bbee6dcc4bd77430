//! `[optimizer]` and `[lr_scheduler]`.

use super::words;
use crate::config::section::section;

section! {
    /// `[optimizer]`: how gradients become steps.
    pub struct Optimizer {
        /// "AdamW".
        pub name: String = "AdamW".into(),
        /// The learning rate that the schedule scales.
        pub lr: f64 = 8e-4,
        /// Decay of the running mean of the gradients.
        pub beta1: f64 = 0.9,
        /// Decay of the running mean of their squares.
        pub beta2: f64 = 0.95,
        /// Added to the root of the second mean, against division by zero.
        pub eps: f64 = 1e-8,
        /// Decoupled weight decay: each step takes `lr * weight_decay` of a parameter away.
        pub weight_decay: f64 = 0.1,
        /// TorchTitan: which of PyTorch's implementations. Here it is the fused kernel always.
        pub implementation: Implementation = Implementation::Fused,
        /// Step each parameter as soon as its gradient is there. Excludes clipping.
        pub early_step_in_backward: bool = false,
    }
}

words! {
    /// PyTorch's implementations of an optimizer.
    pub enum Implementation {
        /// One tensor after the other.
        ForLoop = "for-loop",
        /// Lists of tensors.
        Foreach = "foreach",
        /// One kernel.
        Fused = "fused",
    }
}

section! {
    /// `[lr_scheduler]`: warm-up, a stable phase, decay.
    pub struct LrScheduler {
        /// Steps over which the learning rate rises from 0, linearly.
        pub warmup_steps: u64 = 200,
        /// Steps that the whole schedule spans. Not set: `training.steps`.
        pub total_steps: Option<u64> = None,
        /// Part of the steps, at the end, over which the learning rate falls. Not set: it falls from the end of the
        /// warm-up on, with no stable phase.
        pub decay_ratio: Option<f64> = None,
        /// The curve of the fall: "linear", "sqrt" (one minus the square root) or "cosine".
        pub decay_type: DecayType = DecayType::Linear,
        /// Where the fall ends, as a part of `optimizer.lr`.
        pub min_lr_factor: f64 = 0.0,
    }
}

words! {
    /// The curve by which the learning rate falls.
    pub enum DecayType {
        /// A straight line.
        Linear = "linear",
        /// One minus the square root of the progress.
        Sqrt = "sqrt",
        /// Half a cosine.
        Cosine = "cosine",
    }
}
