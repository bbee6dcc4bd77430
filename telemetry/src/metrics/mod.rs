//! Metrics: the table of their names, and the way from a rank to the exporters.

mod rank;
mod recorder;
pub mod table;
mod telemetry;
pub(crate) mod thread;

pub use rank::RankMetrics;
pub use telemetry::{Options, Otlp, OtlpProtocol, PROMETHEUS_ADDRESS, Telemetry};
