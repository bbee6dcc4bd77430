#![doc = include_str!("../README.md")]

mod ablate;
#[cfg(feature = "checkpoint")]
mod checkpoint_address;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod launch;
pub mod metrics;
pub mod plan;
pub mod train;
