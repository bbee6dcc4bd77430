#![doc = include_str!("../README.md")]
#![allow(unsafe_code)]

pub mod autograd;
mod callback;
pub mod cuda;
mod error;
mod ffi;
pub mod hooks;
pub mod library;
mod list;
pub mod memory;
pub mod optim;
pub mod process_group;
pub mod storage;
pub mod store;

pub use error::{BoxError, Error, Result};
pub use tch;
