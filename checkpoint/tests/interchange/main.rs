//! Checkpoints of other programs.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod convert;
mod dcp;
mod diff;
mod hugging_face;
mod support;
mod transformers;
