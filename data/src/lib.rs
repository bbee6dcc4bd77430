#![doc = include_str!("../README.md")]
//! # Where to look
//! - [`Source`]: which text; [`Files`], [`CargoRegistry`].
//! - [`Tokenizer`]: [`ByteTokenizer`], [`HfTokenizer`].
//! - [`TokenStore`]: the corpus, tokenized once, on disk.
//! - [`Dataset`]: sequences by global number: shuffling and packing.
//! - [`Cursor`], [`Loader`]: which sequences a rank trains on, and a thread that reads them ahead.

mod cursor;
mod dataset;
mod epoch;
mod error;
mod hf_tokenizer;
mod loader;
mod permutation;
mod read;
mod source;
mod store;
mod tokenizer;

pub use cursor::Cursor;
pub use dataset::{Dataset, DatasetOptions, IGNORE, Sample, Split};
pub use epoch::Shuffle;
pub use error::{Error, Result};
pub use hf_tokenizer::HfTokenizer;
pub use loader::{Batch, Loader, LoaderOptions};
pub use source::{CargoRegistry, Files, Format, Source};
pub use store::{BuildOptions, Progress, TokenStore};
pub use tokenizer::{ByteTokenizer, Tokenizer};
