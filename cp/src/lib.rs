#![doc = include_str!("../README.md")]

mod attention;
mod balance;
mod blocks;
mod error;
mod exchange;
mod gather;
mod kernel;
mod mask;
mod method;
mod packed;
mod partial;
mod plan;
mod ring;
mod sharding;
mod transform;

pub use attention::{attention, planned_attention};
pub use balance::Balance;
pub use error::{Error, Result};
pub use ferrotitan_comm as comm;
pub use ferrotitan_nn as nn;
pub use mask::Mask;
pub use method::Method;
pub use plan::Plan;
pub use sharding::Sharding;
pub use tch;
pub use transform::{ContextOptions, ContextParallel};
