//! Which text a run reads, through which tokenizer.

use crate::config::{Config, Problem};
use ferrotitan_data as data;
use std::path::PathBuf;

/// What turns text into tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// A token a byte; no file.
    Byte,
    /// A `tokenizer.json`, or a folder that has one.
    File(PathBuf),
}

impl Tokenizer {
    /// The one that a config names.
    pub(crate) fn of(config: &Config) -> Self {
        match (&config.model.tokenizer_path, &config.model.hf_assets_path) {
            (Some(path), _) if path == "byte" => Self::Byte,
            (Some(path), _) | (None, Some(path)) => Self::File(path.into()),
            (None, None) => Self::Byte,
        }
    }

    /// Loads it.
    ///
    /// # Errors
    /// When its file is missing or corrupt.
    pub fn load(&self) -> ferrotitan_data::Result<Box<dyn data::Tokenizer>> {
        Ok(match self {
            Self::Byte => Box::new(data::ByteTokenizer),
            Self::File(path) => Box::new(data::HfTokenizer::from_file(path)?),
        })
    }

    /// How many tokens it knows.
    pub(crate) fn vocabulary(&self) -> Result<usize, Problem> {
        let keys = ["model.tokenizer_path", "model.hf_assets_path"];
        let loaded =
            self.load().map_err(|error| Problem::new(&keys, format!("the tokenizer cannot be read: {error}")))?;
        Ok(loaded.vocab_size())
    }
}

/// Where text comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Corpus {
    /// The Rust and Markdown files of this workspace's dependencies.
    Cargo,
    /// Each file that the pattern names is a document.
    Text {
        /// A file, a folder, a glob or an object-store URL.
        path: String,
    },
    /// Each line of the files is a record.
    JsonLines {
        /// A file, a folder, a glob or an object-store URL.
        path: String,
        /// The field of a record that holds the text.
        field: String,
    },
    /// Each row of the files is a record.
    Parquet {
        /// A file, a folder, a glob or an object-store URL.
        path: String,
        /// The column that holds the text.
        field: String,
    },
}

impl Corpus {
    /// A corpus by the name that the config has for it. The name and the path are checked.
    fn of(dataset: &str, path: Option<&str>, field: &str) -> Self {
        let (path, field) = (path.unwrap_or_default().to_owned(), field.to_owned());
        match dataset {
            "text" => Self::Text { path },
            "parquet" => Self::Parquet { path, field },
            "jsonl" | "c4" | "c4_test" | "c4_validation" => Self::JsonLines { path, field },
            _ => Self::Cargo,
        }
    }
}

/// What is read for training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataPlan {
    /// Where the text comes from.
    pub corpus: Corpus,
    /// No more than so many bytes of text.
    pub max_bytes: Option<u64>,
    /// What turns it into tokens.
    pub tokenizer: Tokenizer,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of a forward pass on one data-parallel rank.
    pub local_batch: usize,
    /// Sequences of a step over all ranks: `local_batch`, times the data-parallel ranks, times `accumulation`.
    pub global_batch: usize,
    /// Forward passes of a step on each rank.
    pub accumulation: usize,
}

impl DataPlan {
    pub(super) fn of(config: &Config, data_parallel_ranks: usize) -> Self {
        let training = &config.training;
        let pass = training.local_batch_size * data_parallel_ranks as u64;
        let global = u64::try_from(training.global_batch_size).unwrap_or(pass);
        Self {
            corpus: Corpus::of(&training.dataset, training.dataset_path.as_deref(), &training.dataset_text_field),
            max_bytes: training.dataset_max_bytes,
            tokenizer: Tokenizer::of(config),
            seq_len: training.seq_len as usize,
            local_batch: training.local_batch_size as usize,
            global_batch: global as usize,
            accumulation: (global / pass) as usize,
        }
    }
}

/// How the loss on text that is not trained on is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationPlan {
    /// Where the text comes from; `None`: a part of the training corpus is held out.
    pub corpus: Option<Corpus>,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of a forward pass on one data-parallel rank.
    pub local_batch: usize,
    /// Training steps from one measurement to the next.
    pub every: u64,
    /// A measurement takes so many times `local_batch` sequences, on any number of ranks; `None`: all there are.
    pub batches: Option<u64>,
}

impl ValidationPlan {
    pub(super) fn of(config: &Config) -> Option<Self> {
        let validation = &config.validation;
        let field = &config.training.dataset_text_field;
        let path = validation.dataset_path.as_deref();
        validation.enable.then(|| Self {
            corpus: path.map(|path| Corpus::of(&validation.dataset, Some(path), field)),
            seq_len: validation.seq_len as usize,
            local_batch: validation.local_batch_size as usize,
            every: validation.freq,
            batches: u64::try_from(validation.steps).ok(),
        })
    }
}
