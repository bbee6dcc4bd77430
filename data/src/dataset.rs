//! Sequences of a token store, by number.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cursor::Cursor;
use crate::epoch::{Epoch, Members, Shuffle};
use crate::error::{Error, Result};
use crate::source::Source;
use crate::store::{BuildOptions, TokenStore};
use crate::tokenizer::Tokenizer;

/// The label of a position that has none: losses leave it out, as PyTorch's `cross_entropy` does by default.
pub const IGNORE: i64 = -100;

/// Which documents a dataset is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// All but the held-out documents.
    #[default]
    Train,
    /// The held-out documents.
    Validation,
}

/// How sequences are cut from a store.
#[derive(Clone, Debug, PartialEq)]
pub struct DatasetOptions {
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Key of the shuffle.
    pub seed: u64,
    /// What is shuffled.
    pub shuffle: Shuffle,
    /// Which documents are used.
    pub split: Split,
    /// Fraction of the documents, chosen by a hash of their number, that are left to [`Split::Validation`]: at least 0,
    /// below 1. Both splits must be given the same.
    pub held_out: f64,
    /// Whether epoch follows on epoch, or the data ends with the first.
    pub infinite: bool,
}

impl DatasetOptions {
    /// Endless training data in sequences of `seq_len` tokens, fully shuffled, nothing held out.
    pub fn new(seq_len: usize, seed: u64) -> Self {
        Self { seq_len, seed, shuffle: Shuffle::Full, split: Split::Train, held_out: 0.0, infinite: true }
    }
}

/// One sequence. All four have `seq_len` entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Inputs.
    pub tokens: Vec<u32>,
    /// The token after each input; [`IGNORE`] throughout in padding.
    pub labels: Vec<i64>,
    /// Position of each input within its document's part of this sequence: 0 where a document begins, and at the
    /// beginning of the sequence.
    pub positions: Vec<i64>,
    /// Number of each input's document within this sequence: 0, then one more at each document that begins.
    pub documents: Vec<i64>,
}

/// Sequences of a [`TokenStore`], addressed by their global number. Cheap to share: `Arc<Dataset>` between threads.
///
/// An epoch lays all documents of the split end to end, in an order of its own, and cuts the tokens into windows: window
/// `i` has the inputs `i * seq_len .. (i + 1) * seq_len`, and each input's label is the token after it, across the end
/// of a document too, as in TorchTitan. The tokens after the last whole window are left out of that epoch; since the
/// order changes, they are other ones each time. Every window is one sample of the epoch. Sample `g` is sample
/// `g % len` of epoch `g / len`, a function of the store, the options and `g` alone.
#[derive(Debug)]
pub struct Dataset {
    store: Arc<TokenStore>,
    options: DatasetOptions,
    members: Members,
    len: u64,
    /// The latest epochs. A batch may lie across the end of one, and ranks that share a dataset may be a step apart.
    epochs: Mutex<VecDeque<Arc<Epoch>>>,
}

/// Epochs that are kept.
const EPOCHS: usize = 2;

impl Dataset {
    /// Cuts a store into sequences.
    ///
    /// # Errors
    /// [`Error::TooSmall`] where the split does not fill one sequence, [`Error::Option`] for an impossible option.
    pub fn new(store: Arc<TokenStore>, options: DatasetOptions) -> Result<Self> {
        if options.seq_len == 0 {
            let reason = "a sequence has at least one token";
            return Err(Error::Option { option: "seq_len", value: "0".to_owned(), reason });
        }
        if !(0.0..1.0).contains(&options.held_out) {
            let reason = "the held-out fraction is at least 0 and below 1";
            return Err(Error::Option { option: "held_out", value: options.held_out.to_string(), reason });
        }
        let validation = options.split == Split::Validation;
        let members = Members::new(store.documents(), options.held_out, validation);
        let lengths =
            (0..members.len()).map(|member| members.tokens(&store, member)).map(|range| range.end - range.start);
        let tokens: u64 = lengths.sum();
        let len = tokens.saturating_sub(1) / options.seq_len as u64;
        if len == 0 {
            let split = if validation { "validation" } else { "train" };
            let needed = (options.seq_len as u64).saturating_add(1);
            return Err(Error::TooSmall { split, tokens, documents: members.len(), needed });
        }
        Ok(Self { store, options, members, len, epochs: Mutex::new(VecDeque::new()) })
    }

    /// Opens the store of a source below the folder `cache`, or builds it, and cuts it into sequences.
    ///
    /// For progress, cancelling, or two splits of one store: [`TokenStore::open_or_build`] and [`Dataset::new`].
    ///
    /// # Errors
    /// Those of both.
    pub fn open(
        source: &Source,
        tokenizer: &dyn Tokenizer,
        cache: impl AsRef<Path>,
        options: DatasetOptions,
    ) -> Result<Self> {
        let mut go_on = |_| std::ops::ControlFlow::Continue(());
        let store = TokenStore::open_or_build(source, tokenizer, cache, BuildOptions::default(), &mut go_on)?;
        Self::new(Arc::new(store), options)
    }

    /// Samples of an epoch; at least one.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// How many samples there are in all: `None` where epoch follows on epoch.
    pub fn total(&self) -> Option<u64> {
        (!self.options.infinite).then_some(self.len)
    }

    /// Steps of a global batch size from a cursor to the end of finite data, the last of them perhaps padded. The same
    /// on every rank, so that none waits for another at the end. `None` where the data is endless.
    pub fn steps(&self, cursor: Cursor, global_batch_size: u64) -> Option<u64> {
        Some(self.total()?.saturating_sub(cursor.samples).div_ceil(global_batch_size.max(1)))
    }

    /// The options it was made with.
    pub fn options(&self) -> &DatasetOptions {
        &self.options
    }

    /// The store that it reads.
    pub fn store(&self) -> &Arc<TokenStore> {
        &self.store
    }

    /// Everything that a sample's content depends on besides its number, as one line. A cursor means the same batches
    /// only where this is the same: a checkpoint may keep it, to say so on resuming.
    pub fn identity(&self) -> String {
        let DatasetOptions { seq_len, seed, shuffle, split, held_out, infinite: _ } = &self.options;
        let store = self.store.fingerprint();
        format!("store={store} seq_len={seq_len} seed={seed} shuffle={shuffle:?} split={split:?} held_out={held_out}")
    }

    /// The sample of a global number.
    ///
    /// # Errors
    /// [`Error::EndOfData`] beyond finite data, [`Error::Io`] or [`Error::Store`] where the store cannot be read.
    pub fn sample(&self, global: u64) -> Result<Sample> {
        if let Some(len) = self.total().filter(|len| global >= *len) {
            return Err(Error::EndOfData { sample: global, len });
        }
        let epoch = self.epoch(global / self.len);
        let seq_len = self.options.seq_len;
        let start = epoch.window(global % self.len) * seq_len as u64;
        let range = start..start + seq_len as u64 + 1;

        let mut tokens = Vec::with_capacity(seq_len + 1);
        let mut positions = Vec::with_capacity(seq_len + 1);
        let mut documents = Vec::with_capacity(seq_len + 1);
        for (document, part) in (0_i64..).zip(epoch.parts(&self.store, &self.members, range)) {
            let before = tokens.len();
            self.store.read(part, &mut tokens)?;
            positions.extend(0..(tokens.len() - before) as i64);
            documents.resize(tokens.len(), document);
        }
        let labels = tokens[1..].iter().map(|token| i64::from(*token)).collect();
        tokens.truncate(seq_len);
        positions.truncate(seq_len);
        documents.truncate(seq_len);
        Ok(Sample { tokens, labels, positions, documents })
    }

    /// A sample without labels, which fills the last batch of finite data.
    pub fn padding(&self) -> Sample {
        let seq_len = self.options.seq_len;
        Sample {
            tokens: vec![0; seq_len],
            labels: vec![IGNORE; seq_len],
            positions: (0..seq_len as i64).collect(),
            documents: vec![0; seq_len],
        }
    }

    /// An epoch's order. Whoever comes first draws it, and the others wait for it.
    fn epoch(&self, number: u64) -> Arc<Epoch> {
        let mut epochs = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(epoch) = epochs.iter().find(|epoch| epoch.number == number) {
            return epoch.clone();
        }
        let DatasetOptions { seed, shuffle, .. } = self.options;
        let epoch = Arc::new(Epoch::new(number, &self.store, &self.members, self.len, seed, shuffle));
        epochs.truncate(EPOCHS - 1);
        epochs.push_front(epoch.clone());
        epoch
    }
}
