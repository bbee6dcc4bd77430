#![doc = include_str!("../README.md")]

pub mod cli;
pub mod config;
pub mod doctor;
pub mod launch;
pub mod metrics;
pub mod plan;
pub mod train;
