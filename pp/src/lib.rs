#![doc = include_str!("../README.md")]

mod activations;
mod deferred;
mod error;
mod executor;
mod hooks;
mod mail;
mod microbatches;
mod run;
mod split;
mod stages;
mod tied;

pub use activations::Activations;
pub use deferred::{Deferral, Deferred};
pub use error::{Error, Result};
pub use executor::{Pipeline, Statistics};
pub use ferrotitan_comm as comm;
pub use ferrotitan_nn as nn;
pub use ferrotitan_schedule as schedule;
pub use hooks::{NoHooks, StageHooks};
pub use microbatches::microbatches;
pub use split::Split;
pub use stages::{Partition, Stage};
pub use tch;
