//! What a config means: validated, complete, each thing once. Whoever has a [`Plan`] needs no config.

mod checkpoint;
mod data;
mod float8;
mod parallel;
#[cfg(feature = "pp")]
mod pipeline;
mod precision;
mod run;
mod telemetry;

pub use checkpoint::{CheckpointPlan, InitialCheckpoint, LastCheckpoint, ModelDtype, Part};
pub use data::{Corpus, DataPlan, Tokenizer, ValidationPlan};
pub use float8::{Float8Plan, ScaleSharing};
pub use parallel::{Balance, ParallelPlan, Reshard};
#[cfg(feature = "pp")]
pub use pipeline::PipelinePlan;
pub use precision::{Dtype, Precision};
pub use run::{Backend, CommPlan, MetricsPlan, OptimizerPlan, Plan, Recompute, SchedulePlan};
pub use telemetry::{OtlpPlan, TelemetryPlan, TracePlan};
