//! Llama in Hugging Face's format: `config.json` and safetensors files, one or several with an index.
//!
//! [`Model`] reads one; [`write()`] or, by several ranks, [`Export`] writes one. Names become Ferrotitan's or Hugging
//! Face's, and the rows of the query's and the key's projection are put into the order that either's rotary embedding
//! wants. A tokenizer is no part of it.

mod config;
mod export;
mod model;
mod names;

pub use self::config::{Config, RopeScaling};
pub use self::export::{Export, Options, write};
pub use self::model::Model;
use crate::Dtype;

pub(super) const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Whether a model's weights may be of this type.
fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::Bf16 | Dtype::F16)
}
