#![doc = include_str!("../README.md")]

mod cast;
mod error;
mod filter;
mod format;
mod gemm;
mod handle;
mod history;
mod product;
mod recipe;
mod scale;
mod site;
mod small;
mod transform;
mod wire;

pub use cast::{Quantized, Scale, cast, quantize, quantize_blocks, quantize_rows};
pub use error::{Error, Result};
pub use ferrotitan_comm as comm;
pub use ferrotitan_comm::Wire;
pub use ferrotitan_nn as nn;
pub use filter::AUTO_FILTER;
pub use format::{Format, e8m0_decode, e8m0_encode};
pub use gemm::Float8Gemm;
pub use handle::Handle;
pub use product::multiply;
pub use recipe::{Operand, Recipe};
pub use scale::{BLOCK, EPS, amax, amax_of_rows, scale_for};
pub use tch;
pub use transform::{Float8, Options};
pub use wire::Float8Wire;
