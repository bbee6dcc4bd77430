#![doc = include_str!("../README.md")]

mod agree;
mod boxes;
mod checkpoint;
mod dtype;
mod error;
pub mod interchange;
mod load;
mod manifest;
mod save;
mod source;
mod store;
mod tensor_file;

pub use checkpoint::{Checkpoint, Which, steps};
pub use dtype::Dtype;
pub use error::{Error, Result};
pub use ferrotitan_comm as comm;
pub use ferrotitan_mesh as mesh;
pub use load::{LoadOptions, load};
pub use manifest::{File, Part};
pub use object_store;
pub use save::{Item, Mode, SaveOptions, Saver, Stats, save};
pub use source::{Source, TensorInfo};
pub use store::{Store, Writer};
pub use tch;
