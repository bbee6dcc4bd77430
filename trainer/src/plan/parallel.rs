//! How each dimension of the mesh works.

use crate::config::Config;

/// How each dimension of the mesh works. The words are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelPlan {
    /// What becomes of gathered parameters after a forward pass: "default", "always", "never" or a number of ranks.
    pub reshard_after_forward: String,
    /// Between split products, each tensor-parallel rank holds a share of the sequence.
    pub sequence_parallel: bool,
    /// The loss is computed where the logits lie.
    pub loss_parallel: bool,
    /// Tensor parallelism's collectives overlap with its products.
    pub async_tensor_parallel: bool,
    /// How keys and values reach the other context ranks: "allgather", "alltoall", "ring" or "ulysses".
    pub context_method: String,
    /// How a sequence is dealt to the context ranks: "headtail", "documents" or "contiguous".
    pub context_balance: String,
}

impl ParallelPlan {
    pub(super) fn of(config: &Config) -> Self {
        let parallelism = &config.parallelism;
        let balance = parallelism.context_parallel_load_balancer.as_deref().unwrap_or("contiguous");
        Self {
            reshard_after_forward: parallelism.fsdp_reshard_after_forward.clone(),
            sequence_parallel: parallelism.enable_sequence_parallel,
            loss_parallel: !parallelism.disable_loss_parallel,
            async_tensor_parallel: parallelism.enable_async_tensor_parallel,
            context_method: parallelism.context_parallel_rotate_method.to_string(),
            context_balance: balance.to_owned(),
        }
    }
}
