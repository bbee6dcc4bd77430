//! Query-key pairs of each rank, counted.
#![allow(clippy::unwrap_used)]

use ferrotitan_comm::{DeviceMesh, fake};
use ferrotitan_cp::{Balance, ContextOptions, ContextParallel, Mask, Method, Plan, Sharding};
use ferrotitan_mesh::Degrees;
use ferrotitan_nn::Documents;
use proptest::prelude::*;
use tch::Device;

fn pairs(mask: &Mask, sharding: &Sharding, batch: usize) -> Vec<u64> {
    let of = |rank| Plan::new(mask, sharding, Method::Ring, rank, batch).unwrap().pairs();
    (0..sharding.ranks()).map(of).collect()
}

/// The most loaded rank over the mean.
fn worst(pairs: &[u64]) -> f64 {
    *pairs.iter().max().unwrap() as f64 * pairs.len() as f64 / pairs.iter().sum::<u64>() as f64
}

#[test]
fn head_tail_is_equal_work() {
    for ranks in [1, 2, 3, 4, 8, 16] {
        let seq = 2 * ranks * 13;
        let counted = pairs(&Mask::causal(), &Sharding::head_tail(seq, ranks).unwrap(), 2);
        let whole = (seq * (seq + 1)) as u64;
        assert_eq!(counted, vec![whole / ranks as u64; ranks]);
        let contiguous = pairs(&Mask::causal(), &Sharding::contiguous(seq, ranks).unwrap(), 2);
        assert_eq!(contiguous.iter().sum::<u64>(), whole);
        assert!(ranks == 1 || contiguous[ranks - 1] as f64 > 1.4 * whole as f64 / ranks as f64);
    }
}

fn mesh(ranks: usize) -> DeviceMesh {
    fake::mesh(Degrees { cp: ranks, ..Degrees::default() }, 0, Device::Cpu).unwrap()
}

/// Lengths between 1 and a quarter of the sequence, an eighth on average.
fn packing(seq: i64) -> impl Strategy<Value = Vec<i64>> {
    prop::collection::vec(1..=seq / 4, seq as usize / 8).prop_map(move |lengths| {
        let mut left = seq;
        let mut packed = Vec::new();
        for length in lengths {
            if left > 0 {
                packed.push(length.min(left));
                left -= length.min(left);
            }
        }
        if left > 0 {
            packed.push(left);
        }
        packed
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn documents_are_balanced(
        rows in prop::collection::vec(packing(4096), 1..3),
        ranks in prop::sample::select(vec![2usize, 3, 4, 8, 16]),
        causal: bool,
    ) {
        let documents = Documents::from_lengths(rows.clone()).unwrap();
        let mask = if causal { Mask::causal() } else { Mask::full() }.within(documents.clone());
        let sharding = Balance::Documents.sharding(&mask, rows.len(), 4096, ranks).unwrap();
        let counted = pairs(&mask, &sharding, rows.len());
        prop_assert!(worst(&counted) <= 1.1, "{counted:?}");
        let all: i64 = rows.iter().flatten().map(|n| if causal { n * (n + 1) / 2 } else { n * n }).sum();
        prop_assert_eq!(counted.iter().sum::<u64>(), all as u64);
        // The work outside attention stays equal, up to a token a chunk where the length does not divide.
        let slack = if ranks == 3 { 64 } else { 0 };
        prop_assert!(sharding.lengths().iter().all(|tokens| tokens.abs_diff(4096 / ranks) <= slack));
        if causal {
            let options = ContextOptions { method: Method::Ring, balance: Balance::Documents };
            prop_assert_eq!(ContextParallel::new(&mesh(ranks), options).unwrap().work(&documents).unwrap(), counted);
        }
    }
}

/// What there is to gain: head-tail knows nothing of documents.
#[test]
fn head_tail_is_not_enough_for_documents() {
    let lengths = vec![700, 324];
    let mask = Mask::causal().within(Documents::from_lengths(vec![lengths]).unwrap());
    let of = |balance: Balance| worst(&pairs(&mask, &balance.sharding(&mask, 1, 1024, 4).unwrap(), 1));
    let (head_tail, documents) = (of(Balance::HeadTail), of(Balance::Documents));
    assert!(head_tail > 1.5 && documents < 1.05, "{head_tail} {documents}");
}
