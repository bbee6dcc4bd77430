//! A corpus, tokenized once: a folder that any sample can be read from at random.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

mod build;
mod index;

pub use build::{BuildOptions, Progress};

/// Raised whenever the bytes of a store, or the way documents are cut and tokenized, change.
const FORMAT: u32 = 1;

const MANIFEST: &str = "manifest.json";
const TOKENS: &str = "tokens";
const INDEX: &str = "index";
const LOCK: &str = "lock";

/// A tokenized corpus on disk: the idea of Megatron-LM's `.bin` and `.idx`.
///
/// Its folder holds
/// - `tokens`: every document's tokens, one after the other, each document with its begin and end token, as
///   little-endian `u16` where the vocabulary fits, else `u32`;
/// - `index`: where each document begins;
/// - `manifest.json`: sizes and origin. It is written last, so a store without it is an unfinished one.
///
/// A document whose text is longer than a mebibyte is tokenized in pieces of that size, cut after a line: with a
/// tokenizer that merges across lines, or that marks the beginning of a text, such a cut shows in the tokens.
///
/// A store is immutable, and holds no lock once it is built: any number of processes read it at once.
#[derive(Debug)]
pub struct TokenStore {
    folder: PathBuf,
    manifest: Manifest,
    tokens: File,
    /// Where document `i` begins, in tokens; one entry more than documents.
    starts: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    fingerprint: String,
    tokenizer: String,
    vocab_size: usize,
    /// Bytes of a token: 2 or 4.
    width: u64,
    tokens: u64,
    documents: u64,
    text_bytes: u64,
    skipped: u64,
}

impl TokenStore {
    /// Opens a finished store by its folder.
    ///
    /// Sizes, version and document boundaries are checked; the tokens themselves only when they are read.
    ///
    /// # Errors
    /// [`Error::Store`] for a folder that is not a whole store, [`Error::Io`] where it cannot be read.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref().to_owned();
        let damaged = |reason: String| Error::Store { path: folder.display().to_string(), reason };
        let path = folder.join(MANIFEST);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(damaged("it has no manifest, so it was never finished".to_owned()));
            }
            Err(error) => return Err(Error::io("read", &path)(error)),
        };
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|error| damaged(format!("its manifest: {error}")))?;
        if manifest.format != FORMAT {
            return Err(damaged(format!("its format is {}, this version reads {FORMAT}", manifest.format)));
        }
        if manifest.width != width(manifest.vocab_size) {
            return Err(damaged(format!("a token has {} bytes", manifest.width)));
        }
        let path = folder.join(TOKENS);
        let tokens = File::open(&path).map_err(Error::io("open", &path))?;
        let size = tokens.metadata().map_err(Error::io("look up", &path))?.len();
        if manifest.tokens.checked_mul(manifest.width) != Some(size) {
            return Err(damaged(format!("{} tokens in {size} bytes", manifest.tokens)));
        }
        let starts = index::read(&folder.join(INDEX), manifest.documents, manifest.tokens)?;
        let starts = starts.map_err(|reason| damaged(format!("its index: {reason}")))?;
        Ok(Self { folder, manifest, tokens, starts })
    }

    /// The folder it is in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The content address, in hexadecimal: equal for equal sources, options and tokenizers.
    pub fn fingerprint(&self) -> &str {
        &self.manifest.fingerprint
    }

    /// Tokens in all documents.
    pub fn tokens(&self) -> u64 {
        self.manifest.tokens
    }

    /// Documents. Empty texts are none.
    pub fn documents(&self) -> u64 {
        self.manifest.documents
    }

    /// Bytes of text that the tokens stand for.
    pub fn text_bytes(&self) -> u64 {
        self.manifest.text_bytes
    }

    /// Files of a [`CargoRegistry`](crate::CargoRegistry) that were left out for their size or encoding.
    pub fn skipped(&self) -> u64 {
        self.manifest.skipped
    }

    /// The vocabulary of the tokenizer: every token is below it.
    pub fn vocab_size(&self) -> usize {
        self.manifest.vocab_size
    }

    /// Where a document's tokens are among all tokens; nothing where there is no such document.
    pub fn document(&self, index: u64) -> Option<Range<u64>> {
        let index = usize::try_from(index).ok()?;
        Some(*self.starts.get(index)?..*self.starts.get(index.checked_add(1)?)?)
    }

    /// Appends the tokens of a range to `into`.
    ///
    /// # Errors
    /// [`Error::Option`] for a range beyond the end, [`Error::Store`] for a token beyond the vocabulary, [`Error::Io`].
    pub fn read(&self, range: Range<u64>, into: &mut Vec<u32>) -> Result<()> {
        if range.start > range.end || range.end > self.tokens() {
            let value = format!("{range:?}");
            return Err(Error::Option { option: "token range", value, reason: "the store has fewer tokens" });
        }
        let width = self.manifest.width as usize;
        let mut bytes = vec![0; (range.end - range.start) as usize * width];
        let offset = range.start * self.manifest.width;
        self.tokens.read_exact_at(&mut bytes, offset).map_err(Error::io("read", &self.folder.join(TOKENS)))?;
        let before = into.len();
        match width {
            2 => into.extend(bytes.as_chunks().0.iter().map(|bytes| u32::from(u16::from_le_bytes(*bytes)))),
            _ => into.extend(bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))),
        }
        match into[before..].iter().find(|token| **token as usize >= self.vocab_size()) {
            None => Ok(()),
            Some(token) => Err(Error::Store {
                path: self.folder.display().to_string(),
                reason: format!("token {token} in a vocabulary of {}", self.vocab_size()),
            }),
        }
    }
}

/// Bytes of a token of a vocabulary.
fn width(vocab_size: usize) -> u64 {
    if vocab_size <= 1 << 16 { 2 } else { 4 }
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
