//! The Llama's loss and gradients over ranks that share its sequences, against one rank's.
#![allow(clippy::unwrap_used)]

mod alone;
mod beside;
mod gloo;
mod support;
