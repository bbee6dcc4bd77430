//! A thread that puts batches together before they are needed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::cursor::Cursor;
use crate::dataset::{Dataset, IGNORE, Sample};
use crate::error::{Error, Result, panic_message};

/// Which share of which batches a loader yields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Sequences of a step, over all data-parallel ranks and microbatches.
    pub global_batch_size: u64,
    /// This data-parallel rank.
    pub rank: u64,
    /// Number of data-parallel ranks.
    pub ranks: u64,
    /// Steps that are put together ahead of the one in use.
    pub depth: usize,
}

impl LoaderOptions {
    /// All of each batch, two steps ahead.
    pub fn new(global_batch_size: u64) -> Self {
        Self { global_batch_size, rank: 0, ranks: 1, depth: 2 }
    }

    /// The share of one of several data-parallel ranks.
    #[must_use]
    pub fn for_rank(self, rank: u64, ranks: u64) -> Self {
        Self { rank, ranks, ..self }
    }
}

/// One rank's share of a step. The four vectors are matrices of `batch` rows of `seq_len`, row after row, in the type
/// that libtorch's embedding and loss take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Sequences.
    pub batch: usize,
    /// Tokens of each.
    pub seq_len: usize,
    /// As in [`Sample::tokens`].
    pub tokens: Vec<i64>,
    /// As in [`Sample::labels`].
    pub labels: Vec<i64>,
    /// As in [`Sample::positions`].
    pub positions: Vec<i64>,
    /// As in [`Sample::documents`]: they count within a row.
    pub documents: Vec<i64>,
    /// The global number of each row's sample. Those at and beyond the end of finite data are padding.
    pub samples: Range<u64>,
}

impl Batch {
    /// Labels that count in the loss.
    pub fn valid_tokens(&self) -> u64 {
        self.labels.iter().filter(|label| **label != IGNORE).count() as u64
    }

    /// Some rows of it, such as a microbatch.
    ///
    /// # Errors
    /// [`Error::Option`] where there are not so many rows.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self> {
        if rows.start > rows.end || rows.end > self.batch {
            let value = format!("{rows:?} of {}", self.batch);
            return Err(Error::Option { option: "rows", value, reason: "the batch has fewer rows" });
        }
        let cut = |all: &[i64]| all[rows.start * self.seq_len..rows.end * self.seq_len].to_vec();
        Ok(Self {
            batch: rows.len(),
            seq_len: self.seq_len,
            tokens: cut(&self.tokens),
            labels: cut(&self.labels),
            positions: cut(&self.positions),
            documents: cut(&self.documents),
            samples: self.samples.start + rows.start as u64..self.samples.start + rows.end as u64,
        })
    }
}

/// Yields one rank's [`Batch`] for each step from a cursor on, and ends with the data; after an error it ends too.
///
/// A thread of its own reads ahead, at most `depth` steps. It stops when the loader is dropped.
#[derive(Debug)]
pub struct Loader {
    /// `None` once it has ended.
    receiver: Option<Receiver<Result<Batch>>>,
    thread: Option<JoinHandle<()>>,
    options: LoaderOptions,
    cursor: Cursor,
    waited: Duration,
}

impl Loader {
    /// Starts reading ahead.
    ///
    /// # Errors
    /// [`Error::Option`] where the batch cannot be divided as asked, [`Error::Io`] where no thread can be started.
    pub fn new(dataset: Arc<Dataset>, cursor: Cursor, options: LoaderOptions) -> Result<Self> {
        let LoaderOptions { global_batch_size, rank, ranks, depth } = options;
        cursor.batch(global_batch_size, rank, ranks)?;
        let (sender, receiver) = sync_channel(depth);
        let thread = std::thread::Builder::new().name("data-loader".to_owned());
        let thread = thread.spawn(move || read_ahead(&dataset, cursor, options, &sender));
        let thread = thread.map_err(|source| Error::Io {
            action: "start",
            path: "the data loader's thread".to_owned(),
            source,
        })?;
        Ok(Self { receiver: Some(receiver), thread: Some(thread), options, cursor, waited: Duration::ZERO })
    }

    /// Where the run stands after the batches that were yielded: what a checkpoint keeps.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// How long `next` has waited for batches, in all: the time that data cost the run.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Ends the thread; tells whether it panicked.
    fn stop(&mut self) -> Result<()> {
        // Without a receiver, the thread's next attempt to send fails and it returns.
        self.receiver = None;
        let ended = self.thread.take().map_or(Ok(()), JoinHandle::join);
        ended.map_err(|panic| Error::Thread { thread: "data loader", reason: panic_message(&*panic) })
    }
}

impl Iterator for Loader {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = Instant::now();
        let next = self.receiver.as_ref()?.recv();
        self.waited += start.elapsed();
        match next {
            Ok(Ok(batch)) => {
                self.cursor = self.cursor.advance(self.options.global_batch_size);
                Some(Ok(batch))
            }
            Ok(Err(error)) => {
                self.receiver = None;
                Some(Err(error))
            }
            Err(_) => self.stop().err().map(Err),
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::warn!(%error, "dropped a data loader");
        }
    }
}

fn read_ahead(dataset: &Dataset, start: Cursor, options: LoaderOptions, sender: &SyncSender<Result<Batch>>) {
    let mut cursor = start;
    while dataset.total().is_none_or(|total| cursor.samples < total) {
        let batch = read_batch(dataset, cursor, options);
        let failed = batch.is_err();
        if sender.send(batch).is_err() || failed {
            return;
        }
        cursor = cursor.advance(options.global_batch_size);
    }
}

fn read_batch(dataset: &Dataset, cursor: Cursor, options: LoaderOptions) -> Result<Batch> {
    let samples = cursor.batch(options.global_batch_size, options.rank, options.ranks)?;
    let (mut tokens, mut labels, mut positions, mut documents) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut rows = 0;
    for global in samples.clone() {
        let padded = dataset.total().is_some_and(|total| global >= total);
        let sample: Sample = if padded { dataset.padding() } else { dataset.sample(global)? };
        tokens.extend(sample.tokens.iter().map(|token| i64::from(*token)));
        labels.extend(sample.labels);
        positions.extend(sample.positions);
        documents.extend(sample.documents);
        rows += 1;
    }
    let seq_len = dataset.options().seq_len;
    Ok(Batch { batch: rows, seq_len, tokens, labels, positions, documents, samples })
}
