//! What is told of a run: a console line every few steps, `metrics.jsonl` with every step, a progress bar, log lines.
//!
//! The loop fills a [`StepMetrics`] and hands it to [`Metrics::log`], which derives throughput, TFLOP/s and MFU and gives
//! the [`Record`] to each [`Sink`].

mod bar;
mod color;
mod console;
mod jsonl;
mod log;
mod peak;
mod record;
mod summary;
mod units;

pub use bar::{Bar, above_bar, line_above_bar, show_lines};
pub use color::{Color, wants_color};
pub use console::Console;
pub use jsonl::JsonLines;
pub use log::{enter_rank, init_log};
pub use peak::peak_tflops;
pub use record::{Cost, Memory, Metrics, Record, Sink, StepMetrics};
pub use summary::Summary;
pub use units::in_units;
