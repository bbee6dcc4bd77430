//! Models divided among rank threads and processes, against one rank.
#![allow(clippy::unwrap_used)]

mod own_model;
mod parity;
mod processes;
mod refusals;
mod seams;
mod support;
mod traffic;
mod training;
mod two_dimensions;
