//! The one error type of this crate.

use std::path::Path;

/// What can go wrong between a text file and a batch.
///
/// Paths are strings, because some of them are addresses of objects in a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system or the object store refused.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file, folder or address.
        path: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A source names something that is not there.
    #[error("{path} does not exist")]
    NotFound {
        /// The path or address as it was given.
        path: String,
    },
    /// A pattern is valid and names no file at all.
    #[error("no file matches {pattern}")]
    NoMatch {
        /// The pattern as it was given.
        pattern: String,
    },
    /// A pattern or an address cannot be understood.
    #[error("{pattern} is neither a path, a glob nor an address: {reason}")]
    Pattern {
        /// The pattern as it was given.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The source needs a Cargo feature that this build lacks.
    #[error("{path} needs the feature `{feature}` of ferrotitan-data")]
    FeatureOff {
        /// The file or address that needs it.
        path: String,
        /// The feature to switch on.
        feature: &'static str,
    },
    /// A line of a JSONL file is not a JSON object.
    #[error("{path}:{line}: not a JSON object: {reason}")]
    Json {
        /// The file.
        path: String,
        /// The line, counted from 1.
        line: u64,
        /// The parser's words.
        reason: String,
    },
    /// A line of a JSONL file exceeds the limit that keeps memory bounded.
    #[error(
        "{path}:{line}: the line is longer than {limit} bytes, so this is hardly JSONL; name its format, or split it"
    )]
    LineTooLong {
        /// The file.
        path: String,
        /// The line, counted from 1.
        line: u64,
        /// The limit in bytes.
        limit: usize,
    },
    /// A record has no field, or a table no column, of the configured name.
    #[error("{place}: no text field {field:?}, but {found:?}; set the text field to one of these")]
    MissingField {
        /// The file, with the line for JSONL.
        place: String,
        /// The field that was asked for.
        field: String,
        /// The fields that are there.
        found: Vec<String>,
    },
    /// The text field is there but holds no text.
    #[error("{place}: the field {field:?} is {found}, not a string")]
    FieldType {
        /// The file, with the line for JSONL.
        place: String,
        /// The field that was asked for.
        field: String,
        /// What it holds instead.
        found: String,
    },
    /// A text is not UTF-8.
    #[error("{path}: byte {offset} is not UTF-8; convert the file, or narrow the pattern to text files")]
    NotUtf8 {
        /// The file.
        path: String,
        /// Offset in bytes of the first invalid byte, after decompression.
        offset: u64,
    },
    /// A compressed or columnar file cannot be decoded.
    #[error("{path} is corrupt {format}: {reason}")]
    Corrupt {
        /// The file.
        path: String,
        /// What it should have been.
        format: &'static str,
        /// The decoder's words.
        reason: String,
    },
    /// A `Cargo.lock` cannot be used.
    #[error("{path} is not a Cargo.lock: {reason}")]
    Lockfile {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The local Cargo registry lacks packages that the lockfile lists.
    #[error("{} packages are not in {registry} (run `cargo fetch --locked`): {}", names.len(), names.join(", "))]
    MissingPackages {
        /// The folder that was searched.
        registry: String,
        /// `name-version` of every missing package.
        names: Vec<String>,
    },
    /// A tokenizer cannot be loaded, or failed on a text.
    #[error("tokenizer {name}: {reason}")]
    Tokenizer {
        /// The file or the identity of the tokenizer.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The sources hold no text.
    #[error("the corpus is empty: {items} files or packages were read and hold no text ({skipped} files skipped)")]
    Empty {
        /// How many files or packages were read.
        items: usize,
        /// Files left out because they are too large or not UTF-8.
        skipped: u64,
    },
    /// The documents of a split do not fill one sequence.
    #[error(
        "the {split} split has {tokens} tokens in {documents} documents, but one sequence needs {needed}; add text, \
         lower seq_len or change the held-out fraction"
    )]
    TooSmall {
        /// `train` or `validation`.
        split: &'static str,
        /// Tokens in the split.
        tokens: u64,
        /// Documents in the split.
        documents: u64,
        /// `seq_len + 1`.
        needed: u64,
    },
    /// An option has a value that cannot work.
    #[error("{option} is {value}: {reason}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        reason: &'static str,
    },
    /// A token store on disk is damaged. Deleting its folder is always safe: it is rebuilt from the source.
    #[error("token store {path} is damaged ({reason}); delete the folder to have it rebuilt")]
    Store {
        /// Its folder.
        path: String,
        /// What does not hold.
        reason: String,
    },
    /// The progress callback asked to stop.
    #[error("building the token store was cancelled")]
    Cancelled,
    /// A sample beyond the end of a finite dataset was asked for.
    #[error("sample {sample} is beyond the end of the data, which has {len} samples")]
    EndOfData {
        /// The global sample index.
        sample: u64,
        /// How many there are.
        len: u64,
    },
    /// A thread of this crate ended without a result: a bug, here or in a decoder.
    #[error("the {thread} thread ended early: {reason}")]
    Thread {
        /// Which thread.
        thread: &'static str,
        /// The message of its panic.
        reason: String,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// For `map_err`: an I/O error with what was tried on which path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.display().to_string();
        move |source| Self::Io { action, path, source }
    }
}

/// The message of a caught panic.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panicked without a message").to_owned()
}
