//! Tests of the crate as its users see it.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod formats;
mod hf_tokenizer;
#[cfg(feature = "http")]
mod http;
mod loader;
mod packing;
mod registry;
mod store;
mod support;
