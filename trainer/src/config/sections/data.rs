//! `[training]` and `[validation]`: what is read, in which batches, for how long, in which precision.

use super::words;
use crate::config::section::section;

section! {
    /// `[training.dataloader]`: TorchTitan's settings of PyTorch's loader.
    pub struct DataLoader {
        /// TorchTitan: worker processes of the loader.
        pub num_workers: u64 = 0,
        /// TorchTitan: keep the workers from epoch to epoch.
        pub persistent_workers: bool = false,
        /// TorchTitan: put batches into pinned memory.
        pub pin_memory: bool = false,
        /// TorchTitan: batches that each worker reads ahead.
        pub prefetch_factor: Option<u64> = None,
    }
}

section! {
    /// `[training]`: what is read, in which batches, for how long, in which precision.
    pub struct Training {
        /// The kind of corpus. "cargo": the Rust and Markdown files of this workspace's dependencies, which every machine
        /// with a build has. "text", "jsonl", "parquet": files at `dataset_path`. TorchTitan's "c4" and "c4_test" are
        /// JSON lines, too.
        pub dataset: String = "cargo".into(),
        /// A file, a folder, a glob or an object-store URL.
        pub dataset_path: Option<String> = None,
        /// Ferrotitan: the field of a record that holds the text.
        pub dataset_text_field: String = "text".into(),
        /// Ferrotitan: read no more than so many bytes of text.
        pub dataset_max_bytes: Option<u64> = None,
        /// Sequences of a forward pass on one data-parallel rank.
        pub local_batch_size: u64 = 8,
        /// Sequences of a step over all ranks; where it is more than the ranks take at once, gradients are accumulated.
        /// -1: `local_batch_size` times the data-parallel degree.
        pub global_batch_size: i64 = -1,
        /// Tokens of a sequence.
        pub seq_len: u64 = 2048,
        /// Gradients whose global norm is larger are scaled down to it. 0: no clipping.
        pub max_norm: f64 = 1.0,
        /// Steps of the run.
        pub steps: u64 = 10000,
        /// Keep parameters, gradients and optimizer states in CPU memory.
        pub enable_cpu_offload: bool = false,
        /// What parameters, gradients and optimizer states are kept in: "float32", "bfloat16", or "float64".
        pub dtype: DtypeName = DtypeName::Float32,
        /// What parameters are cast to for forward and backward: "bfloat16", "float32", or "float64".
        pub mixed_precision_param: DtypeName = DtypeName::BFloat16,
        /// What gradients are summed over ranks in: "float32", or "float64".
        pub mixed_precision_reduce: DtypeName = DtypeName::Float32,
        /// TorchTitan: steps from one run of Python's garbage collector to the next.
        pub gc_freq: u64 = 50,
        /// TorchTitan: look for reference cycles at every step.
        pub gc_debug: bool = false,
        /// Settings of PyTorch's data loader.
        pub dataloader: DataLoader,
    }
}

words! {
    /// A floating-point type, by TorchTitan's name of it.
    pub enum DtypeName {
        /// 8 exponent bits, 7 of mantissa.
        BFloat16 = "bfloat16",
        /// Single precision.
        Float32 = "float32",
        /// Double precision, for the comparison of layouts.
        Float64 = "float64",
    }
}

section! {
    /// `[validation]`: the loss on text that is not trained on.
    pub struct Validation {
        /// Measure it every `freq` steps, and once at the end.
        pub enable: bool = false,
        /// The kind of corpus at `dataset_path`, as `training.dataset`. TorchTitan's "c4_validation" is JSON lines.
        pub dataset: String = "c4_validation".into(),
        /// Where the text is. Not set: a part of the training corpus is held out.
        pub dataset_path: Option<String> = None,
        /// Sequences of a forward pass on one data-parallel rank.
        pub local_batch_size: u64 = 8,
        /// Tokens of a sequence.
        pub seq_len: u64 = 2048,
        /// Training steps from one measurement to the next.
        pub freq: u64 = 10,
        /// Batches of one measurement. -1: all there are.
        pub steps: i64 = -1,
        /// Settings of PyTorch's data loader.
        pub dataloader: DataLoader,
    }
}
