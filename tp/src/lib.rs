#![doc = include_str!("../README.md")]

mod column;
mod crossing;
mod embedding;
mod error;
mod head;
mod heads;
mod loss;
mod packing;
mod pieces;
mod plan;
mod reader;
mod row;
mod scope;
mod shares;
mod transform;

pub use error::{Error, Result};
pub use ferrotitan_comm as comm;
pub use ferrotitan_nn as nn;
pub use heads::Heads;
pub use loss::vocabulary_cross_entropy;
pub use plan::{Plan, Style};
pub use tch;
pub use transform::{Options, TensorParallel};
