//! The same loss and the same gradients on one rank and on any number.

use crate::support::{assert_parity, batch, config, largest_difference, parallel, single};
use ferrotitan_nn::llama::LlamaConfig;
use ferrotitan_nn::{Batch, Documents};
use ferrotitan_tp::Options;
use proptest::prelude::*;

const DEGREES: [usize; 5] = [1, 2, 3, 4, 8];

fn options() -> impl Iterator<Item = Options> {
    (0..8).map(|bits| Options {
        sequence_parallel: bits & 1 == 0,
        loss_parallel: bits & 2 == 0,
        async_tp: bits & 4 != 0,
    })
}

#[test]
fn every_degree_with_every_option() {
    for tied_embeddings in [false, true] {
        // Nothing divides by 2, 3, 4 or 8 but the heads, of which each degree has at least one.
        let config = LlamaConfig { tied_embeddings, ..config(12, 12, 29, 37) };
        let make = || batch(2, 11, 37);
        let expected = single(&config, &make());
        for (tp, options) in DEGREES.into_iter().flat_map(|tp| options().map(move |options| (tp, options))) {
            let ranks = parallel(&config, tp, options, false, make);
            let (difference, what) = largest_difference(&expected, &ranks);
            assert!(
                difference < 1e-10,
                "tp {tp}, {options:?}, tied {tied_embeddings}: {what} differs by {difference:e}"
            );
        }
    }
}

#[test]
fn fewer_key_value_heads_than_ranks() {
    // Query heads, key-value heads, degree; the last but one deals three query heads of one key-value head to two ranks.
    for (heads, key_value, tp) in [(8, 1, 3), (8, 2, 4), (8, 2, 8), (8, 1, 8), (6, 2, 4), (8, 4, 8)] {
        let config = config(heads, key_value, 24, 32);
        let expected = single(&config, &batch(2, 8, 32));
        for sequence_parallel in [true, false] {
            let options = Options { sequence_parallel, ..Options::default() };
            assert_parity(&expected, &parallel(&config, tp, options, false, || batch(2, 8, 32)));
        }
    }
}

fn layouts() -> impl Strategy<Value = (usize, usize, usize)> {
    let heads = prop::sample::select(vec![(8, 8), (8, 4), (8, 2), (8, 1), (12, 3), (12, 6), (6, 2), (9, 3)]);
    (prop::sample::select(DEGREES.to_vec()), heads)
        .prop_map(|(tp, (heads, key_value))| (tp, heads, key_value))
        .prop_filter("heads that can be dealt", |&(tp, heads, key_value)| {
            key_value >= tp || (tp % key_value == 0 && heads >= tp)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    /// Widths, vocabularies and sequences smaller than the degree leave some ranks with nothing.
    #[test]
    fn a_layout_is_invisible(
        (tp, heads, key_value) in layouts(),
        (hidden, vocabulary) in (1_usize..30, 2_usize..40),
        (rows, sequence) in (1_i64..4, 1_i64..14),
        (sequence_parallel, loss_parallel, async_tp) in any::<(bool, bool, bool)>(),
        (checkpoint, tied_embeddings, documents) in any::<(bool, bool, bool)>(),
    ) {
        let config = LlamaConfig { tied_embeddings, ..config(heads, key_value, hidden, vocabulary) };
        let make = || -> Batch {
            let mut batch = batch(rows, sequence, vocabulary as i64);
            if documents && sequence > 2 {
                batch.documents = Some(Documents::from_lengths(vec![vec![2, sequence - 2]; rows as usize]).unwrap());
            }
            batch
        };
        let options = Options { sequence_parallel, loss_parallel, async_tp };
        let ranks = parallel(&config, tp, options, checkpoint, make);
        let (difference, what) = largest_difference(&single(&config, &make()), &ranks);
        prop_assert!(difference < 1e-10, "{} differs by {:e}", what, difference);
    }
}
