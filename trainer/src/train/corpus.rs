//! The text of a run, tokenized and cut into sequences.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use ferrotitan_data::{
    BuildOptions, CargoRegistry, Dataset, DatasetOptions, Files, Format, Progress, Source, Split, TokenStore, Tokenizer,
};

use crate::plan::{Corpus, Plan};

/// Part of the documents that training does not see where no other text is named for validation.
const HELD_OUT: f64 = 0.02;

/// What a run trains on, and what it is measured on.
#[derive(Clone, Debug)]
pub(super) struct Corpora {
    pub training: Arc<Dataset>,
    pub validation: Option<Arc<Dataset>>,
}

impl Corpora {
    /// Opens the tokenized text, tokenizing it first where that has not been done.
    pub(super) fn open(plan: &Plan) -> anyhow::Result<Self> {
        let tokenizer = plan.data.tokenizer.load()?;
        ensure!(
            tokenizer.vocab_size() <= plan.model.vocab_size,
            "the tokenizer has {} tokens, and the model's vocabulary {}; raise model.vocab_size",
            tokenizer.vocab_size(),
            plan.model.vocab_size
        );
        let store = open(&plan.data.corpus, plan, &*tokenizer)?;
        let held_out = match &plan.validation {
            Some(validation) if validation.corpus.is_none() => HELD_OUT,
            _ => 0.0,
        };
        let training = DatasetOptions { held_out, ..DatasetOptions::new(plan.data.seq_len, plan.seed) };
        let validation = match &plan.validation {
            None => None,
            Some(validation) => {
                let (store, split) = match &validation.corpus {
                    Some(corpus) => (open(corpus, plan, &*tokenizer)?, Split::Train),
                    None => (Arc::clone(&store), Split::Validation),
                };
                let options = DatasetOptions {
                    seq_len: validation.seq_len,
                    held_out,
                    split,
                    infinite: false,
                    ..DatasetOptions::new(validation.seq_len, plan.seed)
                };
                Some(Arc::new(Dataset::new(store, options).context("the validation data")?))
            }
        };
        Ok(Self { training: Arc::new(Dataset::new(store, training).context("the training data")?), validation })
    }
}

fn open(corpus: &Corpus, plan: &Plan, tokenizer: &dyn Tokenizer) -> anyhow::Result<Arc<TokenStore>> {
    let files = |path: &str, format, field: Option<&str>| {
        let mut files = Files::new([path]);
        files.format = Some(format);
        if let Some(field) = field {
            files.text_field = field.to_owned();
        }
        Source::Files(files)
    };
    let source = match corpus {
        Corpus::Cargo => Source::CargoRegistry(CargoRegistry::new(lockfile()?)),
        Corpus::Text { path } => files(path, Format::Text, None),
        Corpus::JsonLines { path, field } => files(path, Format::Jsonl, Some(field)),
        Corpus::Parquet { path, field } => files(path, Format::Parquet, Some(field)),
    };
    let options = BuildOptions { max_bytes: plan.data.max_bytes };
    let mut told = false;
    let store = TokenStore::open_or_build(&source, tokenizer, cache()?, options, &mut |_: Progress| {
        if !std::mem::replace(&mut told, true) {
            tracing::info!("tokenizing the corpus; later runs find it done");
        }
        ControlFlow::Continue(())
    })?;
    tracing::info!(
        "corpus of {} documents, {} tokens, from {} bytes of text",
        store.documents(),
        store.tokens(),
        store.text_bytes()
    );
    Ok(Arc::new(store))
}

/// The `Cargo.lock` of the default corpus: the one at hand, or the one that this program was built from.
fn lockfile() -> anyhow::Result<PathBuf> {
    let built_from = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock");
    let found = ["Cargo.lock", built_from].map(PathBuf::from).into_iter().find(|path| path.is_file());
    found.context("the corpus \"cargo\" needs a Cargo.lock in the current folder; or name another training.dataset")
}

/// Where tokenized corpora are kept, for all runs of a user.
fn cache() -> anyhow::Result<PathBuf> {
    let home = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = home("XDG_CACHE_HOME").or_else(|| Some(home("HOME")?.join(".cache")));
    Ok(cache.context("neither XDG_CACHE_HOME nor HOME says where tokenized text can be kept")?.join("ferrotitan/data"))
}
