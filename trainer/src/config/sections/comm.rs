//! `[comm]` and `[fault_tolerance]`: how ranks talk, and what happens when one is lost.

use super::words;
use crate::config::section::section;

section! {
    /// `[comm]`: how ranks talk.
    pub struct Comm {
        /// Ferrotitan: what a rank is. "threads": a thread of one process. "processes": a process of its own, with Gloo or
        /// NCCL between them. "fake": one rank of many, whose collectives are recorded and not carried out. "auto":
        /// threads for a mesh of CPUs on one machine, processes otherwise.
        pub backend: BackendChoice = BackendChoice::Auto,
        /// Seconds that ranks wait for each other to connect.
        pub init_timeout_seconds: u64 = 300,
        /// Seconds that a collective may take; if `init_timeout_seconds` is longer, that.
        pub train_timeout_seconds: u64 = 100,
        /// Collectives that the recorder of a rank remembers. 0: none.
        pub trace_buf_size: usize = 20000,
        /// Folder for what the recorder remembers when a run hangs, below `job.dump_folder`.
        pub save_traces_folder: String = "comm_traces".into(),
        /// What the name of such a file begins with; the rank follows.
        pub save_traces_file_prefix: String = "rank_".into(),
        /// Ferrotitan: let ranks that are processes compare what they are about to call before every collective, so that a
        /// mismatch of operation, shape or dtype is an error at once and not a hang or a wrong result. Each collective then
        /// costs another, and waits for all ranks to start it. Ranks that are threads always compare.
        pub verify: bool = false,
        /// TorchTitan's name for a kind of `backend`: "fake_backend" is "fake", "local_tensor" is "threads".
        pub mode: CommMode = CommMode::Default,
    }
}

words! {
    /// What a rank is.
    pub enum BackendChoice {
        /// As fits the mesh.
        Auto = "auto",
        /// A thread.
        Threads = "threads",
        /// A process.
        Processes = "processes",
        /// One of many that are not there.
        Fake = "fake",
    }
}

words! {
    /// TorchTitan's modes of communication.
    pub enum CommMode {
        /// Real communication.
        Default = "default",
        /// None.
        FakeBackend = "fake_backend",
        /// All ranks in one process.
        LocalTensor = "local_tensor",
    }
}

section! {
    /// `[fault_tolerance]`: replicas that come and go while the run goes on.
    pub struct FaultTolerance {
        /// Let the run outlive a lost replica.
        pub enable: bool = false,
        /// What carries gradients between replicas: "gloo" or "nccl".
        pub process_group: String = "gloo".into(),
        /// Milliseconds until an operation between replicas is given up.
        pub process_group_timeout_ms: u64 = 10000,
        /// Which replica this is.
        pub replica_id: u64 = 0,
        /// How many there are at most.
        pub group_size: u64 = 0,
        /// How many a step needs at least.
        pub min_replica_size: u64 = 1,
        /// "local_sgd" or "diloco": exchange parameters every few steps instead of gradients at each.
        pub semi_sync_method: Option<String> = None,
        /// With `semi_sync_method`: steps from one exchange to the next.
        pub sync_steps: u64 = 5,
        /// With `semi_sync_method`: exchange in fewer bits.
        pub should_quantize: bool = false,
        /// With `semi_sync_method`: steps that an exchange may take.
        pub fragment_sync_delay: u64 = 0,
        /// With `semi_sync_method`: how much of its own parameters a replica keeps.
        pub fragment_update_alpha: f64 = 0.0,
    }
}
