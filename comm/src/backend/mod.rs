//! The backends: where the ranks of a mesh are, and what their tensors travel through.

mod c10d;
mod environment;
pub mod fake;
mod meeting;
mod memory;
mod outbox;
pub mod processes;
mod room;
pub mod threads;
mod watch;
mod witness;
