//! What a config means: validated, complete, each thing once. Whoever has a [`Plan`] needs no config.

mod data;
mod parallel;
#[cfg(feature = "pp")]
mod pipeline;
mod precision;
mod run;

pub use data::{Corpus, DataPlan, Tokenizer, ValidationPlan};
pub use parallel::{Balance, ParallelPlan, Reshard};
#[cfg(feature = "pp")]
pub use pipeline::PipelinePlan;
pub use precision::{Dtype, Float8Plan, Precision};
pub use run::{Backend, CommPlan, MetricsPlan, OptimizerPlan, Plan, SchedulePlan};
