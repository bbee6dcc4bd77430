//! What a config means: validated, complete, each thing once. Whoever has a [`Plan`] needs no config.

mod data;
mod parallel;
mod precision;
mod run;

pub use data::{Corpus, DataPlan, Tokenizer, ValidationPlan};
pub use parallel::ParallelPlan;
pub use precision::{Dtype, Precision};
pub use run::{Backend, CommPlan, MetricsPlan, OptimizerPlan, Plan, SchedulePlan};
