//! On several ranks: what a layout may not change, and what travels.
#![allow(clippy::unwrap_used)]

mod activations;
mod scales;
mod support;
