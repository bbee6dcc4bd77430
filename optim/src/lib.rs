#![doc = include_str!("../README.md")]

mod adamw;
mod clip;
mod error;
mod schedule;

pub use adamw::{AdamW, AdamWOptions, GroupOptions, Moments};
pub use clip::{NormKind, clip_gradients, gradient_norm};
pub use error::{Error, Result};
pub use ferrotitan_comm as comm;
pub use ferrotitan_nn as nn;
pub use schedule::{Decay, LrSchedule};
