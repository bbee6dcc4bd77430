//! Where a step's time goes: spans of all ranks on one clock, as a Chrome trace, as sums, and as a pipeline's picture.
//!
//! [`Spans`] is a [`tracing_subscriber::Layer`] that keeps the spans of the target [`TARGET`] by rank; what the recorder
//! of collectives knows is added as [`CollectiveRecord`](crate::CollectiveRecord)s. All times are nanoseconds on the clock
//! of rank 0, which [`Clock`] reads and [`offset`] compares with those of other processes.

mod chrome;
mod clock;
mod layer;
mod pipeline;
mod slow;
mod span;
mod summary;
mod table;

pub use chrome::merge;
pub use clock::{Clock, offset};
pub use layer::{Spans, TARGET};
pub use pipeline::{Row, pipeline_rows};
pub use slow::{SlowRank, Turn, Waits, slow_rank};
pub use span::{RankTrace, Span, Trace, Track};
pub use summary::{RankSummary, Summary, summary};
