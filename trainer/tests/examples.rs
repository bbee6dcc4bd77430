//! The examples' models learn, and four ranks of two dimensions give the losses of one.
#![allow(clippy::unwrap_used, dead_code)]
#![cfg(all(feature = "fsdp", feature = "tp"))]

use ferrotitan_mesh::Degrees;

#[path = "../examples/custom_transform.rs"]
mod custom_transform;
#[path = "../examples/recommender.rs"]
mod recommender;
#[path = "../examples/sentence_about_images.rs"]
mod sentence_about_images;

const STEPS: usize = 6;

fn assert_same_on_every_mesh(losses: impl Fn(Degrees) -> Vec<f64>) {
    let alone = losses(Degrees::default());
    assert!(alone.len() == STEPS && alone[STEPS - 1] < alone[0], "{alone:?}");
    for (dp_replicate, dp_shard, tp) in [(1, 2, 2), (2, 1, 1), (1, 1, 2)] {
        let ours = losses(Degrees { dp_replicate, dp_shard, tp, ..Degrees::default() });
        for (ours, alone) in ours.iter().zip(&alone) {
            assert!((ours - alone).abs() <= 1e-10 * alone, "{dp_replicate} x {dp_shard} x {tp}: {ours} {alone}");
        }
    }
}

#[test]
fn recommender() {
    assert_same_on_every_mesh(|degrees| recommender::train(degrees, STEPS).unwrap().0);
    let (_, rows) = recommender::train(Degrees { dp_shard: 2, tp: 2, ..Degrees::default() }, 1).unwrap();
    assert_eq!(rows, [250; 4]);
}

#[test]
fn sentence_about_images() {
    assert_same_on_every_mesh(|degrees| sentence_about_images::train(degrees, STEPS).unwrap().0);
}

#[test]
fn custom_transform() {
    assert_same_on_every_mesh(|degrees| custom_transform::train(degrees, STEPS).unwrap().0);
}
