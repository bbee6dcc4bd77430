#![doc = include_str!("../README.md")]

mod collective;
mod error;
mod export;
pub mod metrics;
mod place;
pub mod report;
pub mod trace;
pub mod tui;

pub use collective::CollectiveRecord;
pub use error::{Error, Result};
pub use place::{Coordinate, Place};
