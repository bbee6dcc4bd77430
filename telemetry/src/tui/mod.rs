//! The live view of a run on a terminal: its loss curve, throughput, memory, what each rank does, log lines.
//!
//! The run writes into a [`View`]; `Tui` (Cargo feature `tui`) draws it, from a thread of its own.

#[cfg(feature = "tui")]
mod draw;
#[cfg(feature = "tui")]
mod screen;
#[cfg_attr(not(feature = "tui"), allow(dead_code, reason = "what is written into a view, only drawing it reads"))]
mod view;

#[cfg(feature = "tui")]
pub use screen::Tui;
pub use view::{RankState, View};
