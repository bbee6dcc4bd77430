//! `[checkpoint]`.

use super::{Names, words};
use crate::config::section::section;

section! {
    /// `[checkpoint]`: what is saved of a run, and what a run starts from.
    pub struct Checkpoint {
        /// Save and load checkpoints.
        pub enable: bool = false,
        /// Save the place in the data, too, in fault-tolerant runs.
        pub enable_ft_dataloader_checkpoints: bool = true,
        /// Folder for checkpoints, below `job.dump_folder`.
        pub folder: String = "checkpoint".into(),
        /// Steps from one checkpoint to the next.
        pub interval: u64 = 500,
        /// The checkpoint to start from where `folder` has none yet.
        pub initial_load_path: Option<String> = None,
        /// Take only the model from `initial_load_path`, not the optimizer or the place in the data.
        pub initial_load_model_only: bool = true,
        /// `initial_load_path` is in Hugging Face's format.
        pub initial_load_in_hf: bool = false,
        /// … and is quantized.
        pub initial_load_in_hf_quantized: bool = false,
        /// The last checkpoint holds only the model.
        pub last_save_model_only: bool = true,
        /// The last checkpoint is in Hugging Face's format.
        pub last_save_in_hf: bool = false,
        /// What the model is saved in at the end, when it is saved alone.
        pub export_dtype: ExportDtype = ExportDtype::Float32,
        /// Save while training goes on: "disabled", "async" or "async_with_pinned_mem".
        pub async_mode: AsyncMode = AsyncMode::Disabled,
        /// Checkpoints that are kept; older ones are removed. 0: all.
        pub keep_latest_k: u64 = 10,
        /// The step to load. -1: the latest.
        pub load_step: i64 = -1,
        /// Parts that are not loaded: "optimizer", "lr_scheduler", "dataloader", …
        pub exclude_from_loading: Names = Names::default(),
        /// Save after the first step, too, to see early that saving works.
        pub enable_first_step_checkpoint: bool = false,
        /// TorchTitan: save initial weights for other layouts to start from. Not needed here: initial weights are the
        /// same on every layout.
        pub create_seed_checkpoint: bool = false,
        /// Load, but never save.
        pub load_only: bool = false,
    }
}

words! {
    /// What a final checkpoint is saved in.
    pub enum ExportDtype {
        /// IEEE half precision.
        Float16 = "float16",
        /// 8 exponent bits, 7 of mantissa.
        BFloat16 = "bfloat16",
        /// Single precision.
        Float32 = "float32",
    }
}

words! {
    /// How far saving overlaps training.
    pub enum AsyncMode {
        /// Not at all.
        Disabled = "disabled",
        /// After a copy to CPU memory.
        Async = "async",
        /// After a copy to pinned CPU memory.
        AsyncWithPinnedMem = "async_with_pinned_mem",
    }
}
