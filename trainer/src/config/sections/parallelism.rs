//! `[parallelism]`: the degrees of the mesh and how each dimension works.

use super::words;
use crate::config::section::section;

section! {
    /// `[parallelism]`: the degrees of the mesh, whose product is the number of ranks, and how each dimension works.
    pub struct Parallelism {
        /// Copies of the model, each of which sees other data.
        pub data_parallel_replicate_degree: usize = 1,
        /// Ranks that share one copy of the parameters and see different data. -1: all ranks that the other degrees leave.
        pub data_parallel_shard_degree: i64 = -1,
        /// Free gathered parameters after the forward pass: "always"; "never"; "default", which is "never" under pipeline
        /// parallelism, and without it "always" but for the last layers, which the backward pass needs first; or a number of
        /// ranks, in blocks of which they are kept.
        pub fsdp_reshard_after_forward: String = "default".into(),
        /// Ranks that split each matrix product.
        pub tensor_parallel_degree: usize = 1,
        /// Ferrotitan: between the split products, each rank holds a share of the sequence instead of the whole.
        pub enable_sequence_parallel: bool = true,
        /// Gather the logits for the loss instead of computing it where they lie.
        pub disable_loss_parallel: bool = false,
        /// Overlap the collectives of tensor parallelism with its matrix products.
        pub enable_async_tensor_parallel: bool = false,
        /// Ranks that split the layers into consecutive stages.
        pub pipeline_parallel_degree: usize = 1,
        /// The modules of each stage, by name. Not set: layers are dealt out evenly.
        pub module_fqns_per_model_part: Option<Vec<Vec<String>>> = None,
        /// Layers that the first stage has less than others, since it has the embedding.
        pub pipeline_parallel_first_stage_less_layers: usize = 1,
        /// Layers that the last stage has less than others, since it has the head.
        pub pipeline_parallel_last_stage_less_layers: usize = 1,
        /// Layers of a stage. Not set: from the model, the schedule and the degree.
        pub pipeline_parallel_layers_per_stage: Option<usize> = None,
        /// The order of forward and backward passes over the stages: "1F1B", "Interleaved1F1B", …
        pub pipeline_parallel_schedule: String = "1F1B".into(),
        /// A CSV file that spells the schedule out. Empty: none.
        pub pipeline_parallel_schedule_csv: String = String::new(),
        /// Sequences of a microbatch.
        pub pipeline_parallel_microbatch_size: usize = 1,
        /// Overlap the collectives of experts and stages under DualPipeV.
        pub pipeline_parallel_expert_parallel_overlap: bool = true,
        /// Ranks that split each sequence.
        pub context_parallel_degree: usize = 1,
        /// How a sequence is dealt to the ranks: "headtail", equal work for causal attention; Ferrotitan: "documents",
        /// about equal work for attention within documents; "contiguous". Not set: "contiguous".
        pub context_parallel_load_balancer: Option<String> = Some("headtail".into()),
        /// How keys and values reach the other ranks: "allgather"; "alltoall" or, Ferrotitan, "ring": one neighbour after
        /// the other; Ferrotitan: "ulysses", which exchanges sequences for heads instead.
        pub context_parallel_rotate_method: RotateMethod = RotateMethod::AllGather,
        /// Ranks that split the experts of a mixture.
        pub expert_parallel_degree: usize = 1,
        /// Ranks that split each expert.
        pub expert_tensor_parallel_degree: usize = 1,
        /// What carries tokens to their experts: "standard" or "deepep".
        pub expert_parallel_comm_backend: ExpertBackend = ExpertBackend::Standard,
        /// TorchTitan: compile the backward pass.
        pub enable_compiled_autograd: bool = false,
    }
}

words! {
    /// How keys and values reach the other ranks of a sequence.
    pub enum RotateMethod {
        /// All at once.
        AllGather = "allgather",
        /// One neighbour after the other.
        AllToAll = "alltoall",
        /// The same.
        Ring = "ring",
        /// Heads for sequences.
        Ulysses = "ulysses",
    }
}

words! {
    /// What carries tokens to their experts.
    pub enum ExpertBackend {
        /// All-to-all collectives.
        Standard = "standard",
        /// DeepEP's kernels.
        DeepEp = "deepep",
    }
}
