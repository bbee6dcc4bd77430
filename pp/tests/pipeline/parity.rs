//! The loss and every gradient equal those of one rank, for every schedule.

use ferrotitan_pp::microbatches;
use ferrotitan_pp::schedule::Algorithm;

use crate::harness::{pipelined, run};
use crate::models::llama::{Case, Share, assert_same};

fn check(case: &Case) {
    let found = pipelined(case);
    assert_same(&found, &case.alone(), 1.0, &format!("{case:?}"));
    let with_loss = found.iter().filter(|share| share.loss != 0.0).count();
    assert_eq!(with_loss, 1, "{case:?}");
}

/// 2 and 4 ranks with each of so many stages, and over these cases every number of microbatches from 1 to 12.
fn check_all(algorithm: impl Fn(usize) -> Algorithm, stages_per_rank: &[usize]) {
    let mut microbatches = 1;
    for ranks in [2, 4] {
        for &stages in stages_per_rank {
            for _ in 0..6 / stages_per_rank.len() {
                // Powers of 2 run through all remainders of 13.
                microbatches = microbatches * 2 % 13;
                check(&Case::new(algorithm(microbatches), ranks, stages, microbatches));
            }
        }
    }
}

#[test]
fn gpipe() {
    check_all(|_| Algorithm::GPipe, &[1, 2, 3]);
}

#[test]
fn one_forward_one_backward() {
    check_all(|_| Algorithm::OneForwardOneBackward, &[1, 2, 3]);
}

#[test]
fn interleaved_1f1b() {
    check_all(|_| Algorithm::Interleaved1F1B, &[1, 2, 3]);
}

#[test]
fn looped_breadth_first() {
    check_all(|_| Algorithm::LoopedBfs, &[1, 2, 3]);
}

#[test]
fn zb1p() {
    check_all(|_| Algorithm::Zb1p, &[1, 2, 3]);
}

#[test]
fn interleaved_zero_bubble() {
    check_all(|_| Algorithm::InterleavedZeroBubble, &[1, 2, 3]);
}

#[test]
fn zbv_zero_bubble() {
    check_all(|_| Algorithm::ZbvZeroBubble, &[2]);
    check(&Case::new(Algorithm::ZbvZeroBubble, 4, 2, 3));
}

#[test]
fn dual_pipe_v() {
    check_all(|_| Algorithm::DualPipeV, &[2]);
    // Enough for overlapped pairs, and fewer than stages.
    check(&Case::new(Algorithm::DualPipeV, 2, 2, 8));
    check(&Case::new(Algorithm::DualPipeV, 4, 2, 2));
}

#[test]
fn flexible() {
    let rounds = |microbatches: usize| Algorithm::Flexible { microbatches_per_round: microbatches.div_ceil(2).max(1) };
    check_all(rounds, &[1, 2, 3]);
    check(&Case::new(Algorithm::Flexible { microbatches_per_round: 5 }, 4, 2, 7));
}

#[test]
fn every_schedule_with_one_microbatch_and_with_twelve() {
    for algorithm in Algorithm::ALL {
        for microbatches in [1, 12] {
            check(&Case::new(algorithm, 2, algorithm.default_stages_per_rank(), microbatches));
        }
    }
}

#[test]
fn recomputed_blocks_and_losses_in_chunks() {
    for algorithm in [Algorithm::OneForwardOneBackward, Algorithm::Zb1p, Algorithm::ZbvZeroBubble, Algorithm::DualPipeV]
    {
        let plain = Case::new(algorithm, 2, algorithm.default_stages_per_rank(), 5);
        check(&Case { chunked: true, ..plain.clone() });
        check(&Case { checkpoint: true, chunked: true, rows: 2, ..plain });
    }
}

#[test]
fn one_rank_is_a_pipeline_too() {
    for algorithm in Algorithm::ALL {
        check(&Case::new(algorithm, 1, algorithm.default_stages_per_rank(), 3));
    }
}

/// Steps add to the gradients, an evaluation changes nothing, and gives the same loss.
#[test]
fn a_second_step_starts_where_the_first_ended() {
    let case = Case::new(Algorithm::InterleavedZeroBubble, 2, 2, 4);
    let found = run(2, |mesh| {
        let mut pipeline = case.pipeline(&mesh)?;
        let parts = microbatches(&case.batch(), case.microbatches)?;
        let first = pipeline.evaluate(&parts)?;
        assert!(pipeline.parameters().iter().all(|parameter| parameter.gradient().unwrap().is_none()));
        assert_eq!((pipeline.statistics().peak_live, pipeline.statistics().peak_held), (0, 0));
        let loss = pipeline.step(&parts, case.tokens())?;
        assert_eq!(first.double_value(&[]), loss.double_value(&[]));
        let loss = pipeline.step(&parts, case.tokens())?;
        Ok(Share::new(&loss, &pipeline, &mesh))
    });
    let mut expected = case.alone();
    expected.gradients.values_mut().for_each(|gradient| *gradient = &*gradient * 2.0);
    assert_same(&found, &expected, 1.0, "two steps");
}

/// The microbatches' labels differ in number, and the loss is divided by that of the step, not by means of means.
#[test]
fn a_step_without_a_label_has_gradients_of_zero() {
    let case = Case::new(Algorithm::OneForwardOneBackward, 2, 1, 2);
    let norms = run(2, |mesh| {
        let mut pipeline = case.pipeline(&mesh)?;
        let mut batch = case.batch();
        batch.labels = batch.labels.map(|mut labels| labels.fill_(ferrotitan_pp::nn::IGNORE_INDEX));
        let loss = pipeline.step(&microbatches(&batch, 2)?, 0.0)?.double_value(&[]);
        let gradients = pipeline.parameters().into_iter().map(|p| p.gradient().unwrap().unwrap());
        Ok(loss + gradients.map(|gradient| gradient.abs().sum(tch::Kind::Double).double_value(&[])).sum::<f64>())
    });
    assert_eq!(norms, [0.0, 0.0]);
}
