//! Samples against a packing that holds everything in memory.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use ferrotitan_data::{Cursor, Dataset, DatasetOptions, Error, Sample, Shuffle, Split};
use proptest::prelude::*;

use crate::support::{byte_documents, store_of, texts};

/// Cuts documents, in the order given, into sequences of `seq_len` inputs.
fn naive(documents: &[Vec<u32>], seq_len: usize) -> Vec<Sample> {
    // Every token with the number of its document.
    let stream: Vec<(u32, usize)> = documents
        .iter()
        .enumerate()
        .flat_map(|(number, tokens)| tokens.iter().map(move |token| (*token, number)))
        .collect();
    let mut samples = Vec::new();
    while samples.len() * seq_len + seq_len < stream.len() {
        let window = &stream[samples.len() * seq_len..][..=seq_len];
        let inputs = &window[..seq_len];
        let first = inputs[0].1;
        let position = |at: usize| inputs[..at].iter().filter(|(_, document)| *document == inputs[at].1).count() as i64;
        samples.push(Sample {
            tokens: inputs.iter().map(|(token, _)| *token).collect(),
            labels: window[1..].iter().map(|(token, _)| i64::from(*token)).collect(),
            positions: (0..seq_len).map(position).collect(),
            documents: inputs.iter().map(|(_, document)| (*document - first) as i64).collect(),
        });
    }
    samples
}

fn dataset(texts: &[String], options: DatasetOptions) -> (tempfile::TempDir, Dataset) {
    let (folder, store) = store_of(texts);
    (folder, Dataset::new(store, options).unwrap())
}

fn epoch(dataset: &Dataset, number: u64) -> Vec<Sample> {
    (0..dataset.len()).map(|index| dataset.sample(number * dataset.len() + index).unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn unshuffled_samples_are_the_naive_packing(texts in texts(1..30), seq_len in 1_usize..40) {
        let expected = naive(&byte_documents(&texts), seq_len);
        let (_folder, store) = store_of(&texts);
        let options = DatasetOptions { shuffle: Shuffle::Off, ..DatasetOptions::new(seq_len, 0) };
        match Dataset::new(store, options) {
            Ok(dataset) => {
                prop_assert_eq!(epoch(&dataset, 0), expected.clone());
                prop_assert_eq!(epoch(&dataset, 3), expected);
            }
            Err(error) => {
                prop_assert!(matches!(error, Error::TooSmall { .. }), "{}", error);
                prop_assert!(expected.is_empty());
            }
        }
    }

    /// The order of the documents is read off from an epoch of one-token sequences; with it, every other sequence
    /// length, and every order of the windows, must be the naive packing of the same order.
    #[test]
    fn shuffled_samples_are_a_naive_packing_of_shuffled_documents(
        texts in texts(2..20), seq_len in 2_usize..20, seed: u64, number in 0_u64..4,
    ) {
        let (_folder, store) = store_of(&texts);
        let options = |seq_len, shuffle| DatasetOptions { shuffle, ..DatasetOptions::new(seq_len, seed) };
        let single = Dataset::new(store.clone(), options(1, Shuffle::Documents)).unwrap();
        let samples = epoch(&single, number);
        let mut stream: Vec<u32> = samples.iter().map(|sample| sample.tokens[0]).collect();
        stream.push(samples.last().unwrap().labels[0] as u32);
        let order: Vec<Vec<u32>> = stream.split_inclusive(|token| *token == 257).map(<[u32]>::to_vec).collect();

        let mut documents = byte_documents(&texts);
        let mut sorted = order.clone();
        documents.sort();
        sorted.sort();
        prop_assert_eq!(documents, sorted, "every document is in every epoch once");

        let expected = naive(&order, seq_len);
        prop_assume!(!expected.is_empty());
        let packed = Dataset::new(store.clone(), options(seq_len, Shuffle::Documents)).unwrap();
        prop_assert_eq!(&epoch(&packed, number), &expected);

        // Shuffling the windows too gives the same multiset of samples.
        let full = Dataset::new(store, options(seq_len, Shuffle::Full)).unwrap();
        let count = |samples: Vec<Sample>| {
            let mut counts = BTreeMap::new();
            for sample in samples {
                *counts.entry((sample.tokens, sample.labels, sample.positions, sample.documents)).or_insert(0) += 1;
            }
            counts
        };
        prop_assert_eq!(count(epoch(&full, number)), count(expected));
    }

    /// However a run is divided, and wherever it stops and resumes, its steps see the same samples in the same order.
    #[test]
    fn the_order_does_not_depend_on_ranks_accumulation_or_resuming(
        texts in texts(8..20), seed: u64, share in 1_u64..4, runs in proptest::collection::vec((0_usize..4, 0_usize..3, 1_u64..5), 3),
    ) {
        let (_folder, dataset) = dataset(&texts, DatasetOptions::new(8, seed));
        let global = 12 * share;
        let mut expected = (0..).map(|index| dataset.sample(index).unwrap());
        let mut cursor = Cursor::default();
        // Three runs, one after the other: stopped twice, each on another mesh.
        for (ranks, accumulation, steps) in runs {
            let ranks = [1, 2, 3, 4][ranks];
            let microbatches = [1, 3, share][accumulation];
            for _ in 0..steps {
                let mut step = Vec::new();
                for rank in 0..ranks {
                    let samples = cursor.batch(global, rank, ranks).unwrap();
                    let size = (samples.end - samples.start).div_ceil(microbatches);
                    let mut start = samples.start;
                    while start < samples.end {
                        let end = (start + size).min(samples.end);
                        step.extend((start..end).map(|index| dataset.sample(index).unwrap()));
                        start = end;
                    }
                }
                let wanted: Vec<Sample> = expected.by_ref().take(global as usize).collect();
                prop_assert_eq!(step, wanted);
                // What a checkpoint does.
                let saved = serde_json::to_string(&cursor.advance(global)).unwrap();
                cursor = serde_json::from_str(&saved).unwrap();
            }
        }
    }

    #[test]
    fn the_splits_part_the_documents(texts in texts(2..60), held_out in 0.05_f64..0.95, seed: u64) {
        let texts: HashSet<String> = texts.into_iter().collect();
        let texts: Vec<String> = texts.into_iter().collect();
        let (_folder, store) = store_of(&texts);
        let mut found = Vec::new();
        for split in [Split::Train, Split::Validation] {
            let options = |seed| DatasetOptions { split, held_out, infinite: false, ..DatasetOptions::new(1, seed) };
            let Ok(dataset) = Dataset::new(store.clone(), options(seed)) else { continue };
            let tokens = |dataset: &Dataset| {
                let mut tokens: Vec<_> = epoch(dataset, 0).into_iter().map(|sample| sample.tokens[0]).collect();
                tokens.sort_unstable();
                tokens
            };
            let other_seed = Dataset::new(store.clone(), options(seed.wrapping_add(1))).unwrap();
            let sizes = (dataset.len(), other_seed.len());
            prop_assert_eq!(sizes.0, sizes.1, "the seed does not move documents between the splits");
            found.extend(tokens(&dataset));
            // The last token of an epoch is a label only.
            let beyond = dataset.sample(dataset.len());
            prop_assert!(matches!(beyond, Err(Error::EndOfData { .. })), "it ends");
        }
        let mut all: Vec<u32> = byte_documents(&texts).concat();
        all.sort_unstable();
        // Each split that holds anything leaves out its last token, which ends a document.
        let missing = all.len() - found.len();
        prop_assert!(missing == 1 || missing == 2, "{} tokens of {} are in no split", missing, all.len());
    }
}

#[test]
fn epochs_and_seeds_differ() {
    let texts: Vec<String> = (0..50).map(|number| format!("document {number}")).collect();
    let (_folder, store) = store_of(&texts);
    let with_seed = |seed| Dataset::new(store.clone(), DatasetOptions::new(8, seed)).unwrap();
    let (one, other) = (with_seed(1), with_seed(2));
    assert_ne!(epoch(&one, 0), epoch(&one, 1));
    assert_ne!(epoch(&one, 0), epoch(&other, 0));
    assert_eq!(epoch(&one, 0), epoch(&with_seed(1), 0));
    // Going back, and being asked out of order, changes nothing.
    assert_eq!(one.sample(5 * one.len() + 3).unwrap(), epoch(&with_seed(1), 5)[3]);
    assert_ne!(one.identity(), other.identity());
    assert_eq!(one.identity(), with_seed(1).identity());
}

#[test]
fn one_long_document_does_not_fill_consecutive_samples() {
    let mut texts = vec!["x".repeat(4000)];
    texts.extend((0..400).map(|number| format!("short {number:04}")));
    let longest_run = |shuffle| {
        let (_folder, dataset) = dataset(&texts, DatasetOptions { shuffle, ..DatasetOptions::new(40, 3) });
        let inside: Vec<bool> = epoch(&dataset, 0)
            .iter()
            .map(|sample| sample.tokens.iter().all(|token| *token == u32::from(b'x')))
            .collect();
        inside.split(|inside| !inside).map(<[bool]>::len).max().unwrap()
    };
    assert!(longest_run(Shuffle::Documents) > 90);
    assert!(longest_run(Shuffle::Full) < 40);
}

#[test]
fn threads_share_a_dataset() {
    let texts: Vec<String> = (0..40).map(|number| format!("document {number}")).collect();
    let (_folder, dataset) = dataset(&texts, DatasetOptions::new(4, 9));
    let dataset = Arc::new(dataset);
    let total = 3 * dataset.len();
    let alone: Vec<Sample> = (0..total).map(|index| dataset.sample(index).unwrap()).collect();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (dataset, alone) = (&dataset, &alone);
            scope.spawn(move || {
                for step in 0..total {
                    let index = (step * 7 + thread * total / 4) % total;
                    assert_eq!(dataset.sample(index).unwrap(), alone[index as usize]);
                }
            });
        }
    });
}
