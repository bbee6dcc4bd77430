//! The thread that reads ahead.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use ferrotitan_data::{Batch, Cursor, Dataset, DatasetOptions, Error, IGNORE, Loader, LoaderOptions, Sample};
use proptest::prelude::*;

use crate::support::{store_of, texts};

/// Runs what must not hang: a failure after ten seconds rather than never.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(Duration::from_secs(10)).expect("it hangs, or panicked")
}

fn flat(samples: &[Sample]) -> [Vec<i64>; 4] {
    let wide = |tokens: &[u32]| tokens.iter().map(|token| i64::from(*token)).collect::<Vec<_>>();
    [
        samples.iter().flat_map(|sample| wide(&sample.tokens)).collect(),
        samples.iter().flat_map(|sample| sample.labels.clone()).collect(),
        samples.iter().flat_map(|sample| sample.positions.clone()).collect(),
        samples.iter().flat_map(|sample| sample.documents.clone()).collect(),
    ]
}

fn parts(batch: &Batch) -> [Vec<i64>; 4] {
    [batch.tokens.clone(), batch.labels.clone(), batch.positions.clone(), batch.documents.clone()]
}

fn numbered(count: usize, options: DatasetOptions) -> (tempfile::TempDir, Arc<Dataset>) {
    let texts: Vec<String> = (0..count).map(|number| format!("document {number}")).collect();
    let (folder, store) = store_of(&texts);
    (folder, Arc::new(Dataset::new(store, options).unwrap()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// The ranks' batches of a step, one after the other, are the step's samples; stopped twice, each time on another
    /// number of ranks, with batches in flight.
    #[test]
    fn ranks_together_read_each_sample_once(
        texts in texts(5..15), seed: u64, depth in 0_usize..4,
        runs in proptest::collection::vec((prop::sample::select(vec![1_u64, 2, 3, 6]), 1_usize..5), 3),
    ) {
        let (_folder, store) = store_of(&texts);
        let dataset = Arc::new(Dataset::new(store, DatasetOptions::new(5, seed)).unwrap());
        let global = 6;
        let mut cursor = Cursor::default();
        for (ranks, steps) in runs {
            let start = |rank| {
                let options = LoaderOptions { depth, ..LoaderOptions::new(global).for_rank(rank, ranks) };
                Loader::new(dataset.clone(), cursor, options).unwrap()
            };
            let mut loaders: Vec<Loader> = (0..ranks).map(start).collect();
            for _ in 0..steps {
                let batches: Vec<Batch> = loaders.iter_mut().map(|loader| loader.next().unwrap().unwrap()).collect();
                let samples: Vec<Sample> =
                    (cursor.samples..cursor.samples + global).map(|index| dataset.sample(index).unwrap()).collect();
                let mut together = [const { Vec::new() }; 4];
                for batch in &batches {
                    prop_assert_eq!((batch.batch as u64, batch.seq_len), (global / ranks, 5));
                    prop_assert_eq!(batch.valid_tokens(), 5 * global / ranks);
                    // Microbatches are rows.
                    for row in 0..batch.batch {
                        for (all, part) in together.iter_mut().zip(parts(&batch.rows(row..row + 1).unwrap())) {
                            all.extend(part);
                        }
                    }
                }
                prop_assert_eq!(together, flat(&samples));
                cursor = cursor.advance(global);
                prop_assert!(loaders.iter().all(|loader| loader.cursor() == cursor));
            }
        }
    }
}

#[test]
fn finite_data_ends_at_the_same_step_on_every_rank() {
    let (_folder, dataset) = numbered(20, DatasetOptions { infinite: false, ..DatasetOptions::new(16, 1) });
    let len = dataset.len();
    assert_eq!(len, (10 * 12 + 10 * 13 - 1) / 16, "the tokens of this corpus");
    let global = 4;
    let steps = len.div_ceil(global);
    assert_ne!(len % global, 0);
    assert_eq!(dataset.steps(Cursor::default(), global), Some(steps));
    assert_eq!(dataset.steps(Cursor { samples: 4 }, global), Some(steps - 1));
    assert_eq!(dataset.steps(Cursor { samples: len + 5 }, global), Some(0));
    let mut valid = 0;
    let mut seen = Vec::new();
    for rank in 0..global {
        let dataset = dataset.clone();
        let batches: Vec<Batch> = in_time(move || {
            let options = LoaderOptions::new(global).for_rank(rank, global);
            Loader::new(dataset, Cursor::default(), options).unwrap().collect::<Result<_, _>>().unwrap()
        });
        assert_eq!(batches.len() as u64, steps);
        for batch in batches {
            valid += batch.valid_tokens();
            let padded = batch.samples.start >= len;
            assert_eq!(padded, batch.labels.iter().all(|label| *label == IGNORE));
            assert_eq!(batch.tokens.len(), 16);
            if !padded {
                seen.extend(batch.samples);
            }
        }
    }
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..len));
    assert_eq!(valid, len * 16);
}

#[test]
fn dropping_ends_the_thread() {
    let (_folder, dataset) = numbered(20, DatasetOptions::new(4, 1));
    for (depth, taken) in [(0, 0), (0, 1), (3, 0), (3, 2), (1000, 1)] {
        let shared = dataset.clone();
        in_time(move || {
            let options = LoaderOptions { depth, ..LoaderOptions::new(2) };
            let mut loader = Loader::new(shared, Cursor::default(), options).unwrap();
            assert_eq!(loader.by_ref().take(taken).count(), taken);
        });
        assert_eq!(Arc::strong_count(&dataset), 1, "the thread is gone");
    }
}

#[test]
fn errors_are_yielded_and_end_it() {
    let (_folder, dataset) = numbered(200, DatasetOptions::new(4, 1));
    let tokens = dataset.store().folder().join("tokens");
    std::fs::OpenOptions::new().write(true).open(tokens).unwrap().set_len(100).unwrap();
    let results: Vec<_> = in_time({
        let dataset = dataset.clone();
        move || Loader::new(dataset, Cursor::default(), LoaderOptions::new(2)).unwrap().take(10_000).collect()
    });
    assert!(matches!(results.last(), Some(Err(Error::Io { action: "read", .. }))));
    assert_eq!(results.iter().filter(|result| result.is_err()).count(), 1);

    let new = |samples, options| Loader::new(dataset.clone(), Cursor { samples }, options).map(|_| ());
    let two = LoaderOptions::new(2);
    assert!(matches!(new(0, LoaderOptions::new(0)), Err(Error::Option { .. })));
    assert!(matches!(new(0, two.for_rank(0, 3)), Err(Error::Option { option: "global_batch_size", .. })));
    assert!(matches!(new(0, two.for_rank(2, 2)), Err(Error::Option { option: "rank", .. })));
    assert!(matches!(new(0, two.for_rank(0, 0)), Err(Error::Option { option: "rank", .. })));
    assert!(matches!(new(u64::MAX, two), Err(Error::Option { option: "cursor", .. })));
}

#[test]
fn waiting_is_counted() {
    let (_folder, dataset) = numbered(20, DatasetOptions::new(4, 1));
    let mut loader = Loader::new(dataset, Cursor::default(), LoaderOptions::new(2)).unwrap();
    assert_eq!(loader.waited(), Duration::ZERO);
    loader.next().unwrap().unwrap();
    let first = loader.waited();
    assert!(first > Duration::ZERO);
    // Batches that lie ready cost next to nothing.
    std::thread::sleep(Duration::from_millis(200));
    loader.next().unwrap().unwrap();
    assert!(loader.waited() - first < Duration::from_millis(100));
    let batch = loader.next().unwrap().unwrap();
    assert!(matches!(batch.rows(1..3), Err(Error::Option { .. })));
    assert_eq!(batch.rows(0..2).unwrap(), batch);
}
