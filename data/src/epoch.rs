//! Packing: which tokens of which documents make a sequence of an epoch.

use std::ops::Range;

use rayon::prelude::*;

use crate::permutation::{Permutation, mix};
use crate::store::TokenStore;

/// How the order of an epoch is drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shuffle {
    /// Documents and sequences in the order of the corpus, every epoch alike.
    Off,
    /// Documents in a new order every epoch, sequences in the order of the documents. A document longer than a sequence
    /// fills consecutive samples.
    Documents,
    /// Documents in a new order every epoch, and the sequences that are cut from them in another.
    #[default]
    Full,
}

/// The documents of a split: all of a store, or some.
#[derive(Debug)]
pub(crate) enum Members {
    All(u64),
    Some(Vec<u64>),
}

impl Members {
    /// The documents of one side of the split. A document's side depends on its number alone, not on the seed of the
    /// shuffle, so that no run trains on what another one holds out.
    pub(crate) fn new(documents: u64, held_out: f64, validation: bool) -> Self {
        if held_out == 0.0 {
            return if validation { Self::Some(Vec::new()) } else { Self::All(documents) };
        }
        // Hashes of 53 bits are exact as `f64`.
        let is_held_out = |document: u64| (mix(document) >> 11) as f64 / ((1_u64 << 53) as f64) < held_out;
        Self::Some((0..documents).filter(|document| is_held_out(*document) == validation).collect())
    }

    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::All(documents) => *documents,
            Self::Some(documents) => documents.len() as u64,
        }
    }

    /// Tokens of the member, among those of the store.
    pub(crate) fn tokens(&self, store: &TokenStore, member: u64) -> Range<u64> {
        let document = match self {
            Self::All(_) => member,
            Self::Some(documents) => documents[member as usize],
        };
        store.document(document).expect("members are documents of the store that they were made for")
    }
}

/// One epoch's order, and where each document begins in it.
#[derive(Debug)]
pub(crate) struct Epoch {
    pub(crate) number: u64,
    documents: Option<Permutation>,
    windows: Option<Permutation>,
    /// Where the document at each place of the order begins, in tokens; one entry more than documents.
    starts: Vec<u64>,
}

impl Epoch {
    /// Draws an epoch's order of `samples` windows and sums up its documents: once per epoch, on all cores.
    pub(crate) fn new(
        number: u64,
        store: &TokenStore,
        members: &Members,
        samples: u64,
        seed: u64,
        shuffle: Shuffle,
    ) -> Self {
        // Two streams an epoch. No run reaches half of 2^64 epochs, so the streams do not meet.
        let draw = |n, stream: u64| Permutation::new(n, seed, number.wrapping_mul(2).wrapping_add(stream));
        let documents = (shuffle != Shuffle::Off).then(|| draw(members.len(), 0));
        let windows = (shuffle == Shuffle::Full).then(|| draw(samples, 1));
        let length = |place| {
            let member = documents.as_ref().map_or(place, |order| order.get(place));
            let tokens = members.tokens(store, member);
            tokens.end - tokens.start
        };
        let mut starts: Vec<u64> = Vec::with_capacity(members.len() as usize + 1);
        starts.par_extend((0..members.len()).into_par_iter().map(length));
        starts.push(0);
        let mut sum = 0;
        for start in &mut starts {
            sum += std::mem::replace(start, sum);
        }
        Self { number, documents, windows, starts }
    }

    /// Where the epoch's sample `index` begins among its tokens, in units of a sequence.
    pub(crate) fn window(&self, index: u64) -> u64 {
        self.windows.as_ref().map_or(index, |order| order.get(index))
    }

    /// The parts of documents that make up a range of the epoch's tokens, as tokens of the store, in order.
    pub(crate) fn parts<'a>(
        &'a self,
        store: &'a TokenStore,
        members: &'a Members,
        range: Range<u64>,
    ) -> impl Iterator<Item = Range<u64>> + 'a {
        let first = self.starts.partition_point(|start| *start <= range.start) - 1;
        let mut place = first;
        std::iter::from_fn(move || {
            let start = *self.starts.get(place)?;
            if start >= range.end || place as u64 >= members.len() {
                return None;
            }
            let member = self.documents.as_ref().map_or(place as u64, |order| order.get(place as u64));
            let tokens = members.tokens(store, member);
            let from = range.start.saturating_sub(start);
            let to = (range.end - start).min(tokens.end - tokens.start);
            place += 1;
            Some(tokens.start + from..tokens.start + to)
        })
    }
}
