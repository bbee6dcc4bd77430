//! `[job]`, `[profiling]`, `[metrics]` and `[experimental]`: the run as a whole and what it tells about itself.

use super::words;
use crate::config::section::section;

section! {
    /// `[job]`: the run as a whole.
    pub struct Job {
        /// Folder that receives everything the run writes; other folders of the config lie below it.
        pub dump_folder: String = "./outputs".into(),
        /// One line about the run, for whoever reads its logs.
        pub description: String = "default job".into(),
        /// Print the complete config when the run starts.
        pub print_config: bool = false,
        /// Write the complete config into this file below `dump_folder`.
        pub save_config_file: Option<String> = None,
        /// TorchTitan: a Python module that extends the config.
        pub custom_config_module: String = String::new(),
        /// TorchTitan: include this config in its integration tests.
        pub use_for_integration_test: bool = false,
    }
}

section! {
    /// `[profiling]`: traces of single steps.
    pub struct Profiling {
        /// Record a trace every `profile_freq` steps.
        pub enable_profiling: bool = false,
        /// Folder for traces, below `job.dump_folder`.
        pub save_traces_folder: String = "profile_traces".into(),
        /// Steps from one trace to the next.
        pub profile_freq: u64 = 10,
        /// Steps that a trace covers.
        pub profiler_active: u64 = 1,
        /// Steps that the profiler runs before a trace without keeping them.
        pub profiler_warmup: u64 = 3,
        /// Record the allocator's history and dump it.
        pub enable_memory_snapshot: bool = false,
        /// Folder for memory snapshots, below `job.dump_folder`.
        pub save_memory_snapshot_folder: String = "memory_snapshot".into(),
    }
}

section! {
    /// `[metrics]`: what is told of the steps. `metrics.jsonl` in `job.dump_folder` always has every step.
    pub struct Metrics {
        /// Steps from one console line to the next; the first step has one always.
        pub log_freq: u64 = 10,
        /// Write TensorBoard event files.
        pub enable_tensorboard: bool = false,
        /// Console lines without color. The environment variable `NO_COLOR` does the same.
        pub disable_color_printing: bool = false,
        /// Folder for TensorBoard event files, below `job.dump_folder`.
        pub save_tb_folder: String = "tb".into(),
        /// Let every rank write its metrics, not the first alone.
        pub save_for_all_ranks: bool = false,
        /// Ferrotitan: serve metrics to Prometheus.
        pub enable_prometheus: bool = false,
        /// Ferrotitan: where. Whoever can reach the address can read them.
        pub prometheus_address: String = "127.0.0.1:9464".into(),
        /// Ferrotitan: send metrics and spans over OTLP.
        pub enable_otlp: bool = false,
        /// Ferrotitan: the collector, "http://host:4317" for gRPC or "http://host:4318" for HTTP. Not set: as the
        /// environment variables of OpenTelemetry say.
        pub otlp_endpoint: Option<String> = None,
        /// Ferrotitan: "grpc" or "http/protobuf". Not set: as the environment says.
        pub otlp_protocol: Option<OtlpProtocol> = None,
        /// Send metrics to Weights & Biases.
        pub enable_wandb: bool = false,
        /// Ferrotitan: peak of one device in dense bfloat16 TFLOP/s, for the MFU. Not set: known from the device's name,
        /// and no MFU is given for a device that is not known, a CPU for one.
        pub peak_tflops: Option<f64> = None,
        /// Ferrotitan: how the FLOPs of attention count towards TFLOP/s and MFU. "full", as TorchTitan counts: every
        /// query times every key. "causal": half of that, as NVIDIA counts.
        pub mfu_convention: MfuConvention = MfuConvention::Full,
    }
}

words! {
    /// How OTLP travels.
    pub enum OtlpProtocol {
        /// gRPC.
        Grpc = "grpc",
        /// HTTP.
        HttpProtobuf = "http/protobuf",
    }
}

words! {
    /// How the FLOPs of attention are counted.
    pub enum MfuConvention {
        /// Every query times every key: TorchTitan's.
        Full = "full",
        /// The causal half: NVIDIA's.
        Causal = "causal",
    }
}

section! {
    /// `[experimental]`: TorchTitan's extension by Python modules.
    pub struct Experimental {
        /// TorchTitan: a Python module to import before the run.
        pub custom_import: String = String::new(),
    }
}
