//! Pipelines on ranks that are threads, against one rank.
#![allow(clippy::unwrap_used)]

mod deferral;
mod failures;
mod gloo;
mod harness;
mod held;
#[path = "../models/mod.rs"]
mod models;
mod parity;
mod sharded;
mod tied;
mod timing;
