#![doc = include_str!("../README.md")]

mod action;
mod algorithm;
mod breadth_first;
mod costs;
mod csv;
mod error;
mod interleaved;
mod list_scheduling;
mod lower;
mod lowered;
pub mod render;
mod simulate;
mod structure;
mod timeline;
mod v_shape;
mod verify;

pub use action::{Action, Kind, Schedule, Step};
pub use algorithm::Algorithm;
pub use costs::Costs;
pub use error::{Error, Result, Unsound, Wait};
pub use lower::{LoweringOptions, lower};
pub use lowered::{Lowered, Message, Op, Payload};
pub use simulate::simulate;
pub use timeline::{Span, Timeline};
pub use verify::{RankReport, Report, verify};
