//! How each dimension of the mesh works.

use ferrotitan_nn::llama::LlamaConfig;

use crate::config::sections::RotateMethod;
use crate::config::{Config, Problem};

/// What becomes of gathered parameters after a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reshard {
    /// As fits the rest of the mesh.
    Default,
    /// Freed.
    Always,
    /// Kept.
    Never,
    /// Kept in blocks of so many ranks.
    Ranks(usize),
}

impl Reshard {
    /// By the word of the config.
    pub(crate) fn of(word: &str) -> Option<Self> {
        Some(match word {
            "default" => Self::Default,
            "always" => Self::Always,
            "never" => Self::Never,
            number => Self::Ranks(number.parse().ok().filter(|ranks| *ranks > 0)?),
        })
    }
}

/// How a sequence is dealt to the context ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    /// Equal work for causal attention.
    HeadTail,
    /// About equal work for attention within documents.
    Documents,
    /// In order.
    Contiguous,
}

impl Balance {
    /// By the word of the config.
    pub(crate) fn of(word: Option<&str>) -> Option<Self> {
        Some(match word {
            Some("headtail") => Self::HeadTail,
            Some("documents") => Self::Documents,
            Some("contiguous") | None => Self::Contiguous,
            Some(_) => return None,
        })
    }
}

/// How each dimension of the mesh works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelPlan {
    /// What becomes of gathered parameters after a forward pass.
    pub reshard_after_forward: Reshard,
    /// Parameters, gradients and the optimizer's state are in CPU memory, whatever computes.
    pub cpu_offload: bool,
    /// Between split products, each tensor-parallel rank holds a share of the sequence.
    pub sequence_parallel: bool,
    /// The loss is computed where the logits lie.
    pub loss_parallel: bool,
    /// Tensor parallelism's collectives overlap with its products.
    pub async_tensor_parallel: bool,
    /// How keys and values reach the other context ranks.
    pub rotate_method: RotateMethod,
    /// How a sequence is dealt to the context ranks.
    pub balance: Balance,
    /// What the pipeline ranks do, where there are several.
    #[cfg(feature = "pp")]
    pub pipeline: Option<super::PipelinePlan>,
}

impl ParallelPlan {
    /// The words of the config are checked.
    pub(super) fn of(config: &Config, model: &LlamaConfig) -> Result<Self, Vec<Problem>> {
        #[cfg(not(feature = "pp"))]
        let _ = model;
        let parallelism = &config.parallelism;
        let balance = parallelism.context_parallel_load_balancer.as_deref();
        Ok(Self {
            reshard_after_forward: Reshard::of(&parallelism.fsdp_reshard_after_forward).unwrap_or(Reshard::Default),
            cpu_offload: config.training.enable_cpu_offload,
            sequence_parallel: parallelism.enable_sequence_parallel,
            loss_parallel: !parallelism.disable_loss_parallel,
            async_tensor_parallel: parallelism.enable_async_tensor_parallel,
            rotate_method: parallelism.context_parallel_rotate_method,
            balance: Balance::of(balance).unwrap_or(Balance::Contiguous),
            #[cfg(feature = "pp")]
            pipeline: super::PipelinePlan::of(config, model)?,
        })
    }
}
