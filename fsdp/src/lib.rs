#![doc = include_str!("../README.md")]

mod engine;
mod error;
mod fsdp;
mod handle;
mod log;
mod options;
mod pack;
mod reduce;
mod sharded;
mod unit;

pub use error::{Error, Result};
pub use ferrotitan_comm as comm;
pub use ferrotitan_comm::Wire;
pub use ferrotitan_nn as nn;
pub use fsdp::Fsdp;
pub use handle::Handle;
pub use log::{Event, Stats, What};
pub use options::{Options, Reshard};
pub use sharded::{Sharded, Unit};
pub use tch;
