//! Checkpoints of other programs: read, written, converted and compared.
//!
//! Everything here is, or works on, a [`Source`](crate::Source): a Hugging Face [model](hugging_face::Model), a
//! [folder](dcp::Folder) of PyTorch's distributed checkpoints, tensors in [memory](Memory), or a
//! [`Checkpoint`](crate::Checkpoint) of this crate. [`open`] finds out which of these a folder is.

mod cast;
mod convert;
pub mod dcp;
mod diff;
mod flaw;
mod gather;
pub mod hugging_face;
mod memory;
mod opened;
mod safetensors_file;

pub use self::convert::convert;
pub use self::diff::{Difference, Finding, diff, read_all};
pub use self::memory::Memory;
pub use self::opened::{Opened, Row, open};
