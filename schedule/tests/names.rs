//! Names of schedules, and sizes that they refuse.
#![allow(clippy::unwrap_used)]

use ferrotitan_schedule::{Algorithm, Error};

#[test]
fn names_of_torch_and_torchtitan_in_any_case() {
    for (text, algorithm) in [
        ("1F1B", Algorithm::OneForwardOneBackward),
        ("1f1b", Algorithm::OneForwardOneBackward),
        ("Schedule1F1B", Algorithm::OneForwardOneBackward),
        ("Interleaved1F1B", Algorithm::Interleaved1F1B),
        ("ScheduleInterleaved1F1B", Algorithm::Interleaved1F1B),
        ("FlexibleInterleaved1F1B", Algorithm::Interleaved1F1B),
        ("gpipe", Algorithm::GPipe),
        ("LoopedBFS", Algorithm::LoopedBfs),
        ("ZB1P", Algorithm::Zb1p),
        ("INTERLEAVEDZEROBUBBLE", Algorithm::InterleavedZeroBubble),
        ("ScheduleZBVZeroBubble", Algorithm::ZbvZeroBubble),
        ("zbv", Algorithm::ZbvZeroBubble),
        (" DualPipeV ", Algorithm::DualPipeV),
        ("Flexible(5)", Algorithm::Flexible { microbatches_per_round: 5 }),
    ] {
        assert_eq!(text.parse::<Algorithm>().unwrap(), algorithm, "{text}");
    }
    for algorithm in Algorithm::ALL.into_iter().chain([Algorithm::Flexible { microbatches_per_round: 3 }]) {
        assert_eq!(algorithm.to_string().parse::<Algorithm>().unwrap(), algorithm);
    }
}

#[test]
fn unknown_names_say_what_there_is() {
    let message = |name: &str| name.parse::<Algorithm>().unwrap_err().to_string();
    assert_eq!(message("1F1"), "no schedule is named `1F1`: did you mean `1F1B`?");
    assert_eq!(
        message("InterleavedZeroBuble"),
        "no schedule is named `InterleavedZeroBuble`: did you mean `InterleavedZeroBubble`?"
    );
    assert_eq!(
        message("chimera"),
        "no schedule is named `chimera`: choose GPipe, 1F1B, Interleaved1F1B, LoopedBFS, ZB1P, InterleavedZeroBubble, \
         ZBVZeroBubble, DualPipeV or Flexible(N)"
    );
    assert!(message("Flexible").contains("Flexible(5)"));
    assert!(message("Flexible(-1)").contains("Flexible(5)"));
    assert!(message("PipelineScheduleMulti").contains("CSV"));
    assert!(message(&"x".repeat(1 << 20)).len() < 400);
    assert!(message("").contains("GPipe"));
}

#[test]
fn sizes_that_mean_nothing_are_refused() {
    let error = |algorithm: Algorithm, ranks, stages, microbatches| {
        algorithm.generate(ranks, stages, microbatches).unwrap_err()
    };
    for algorithm in Algorithm::ALL {
        assert!(matches!(error(algorithm, 0, 2, 1), Error::Zero { .. }));
        assert!(matches!(error(algorithm, 1, 0, 1), Error::Zero { .. }));
        assert!(matches!(error(algorithm, 1, 2, 0), Error::Zero { .. }));
        assert!(matches!(error(algorithm, 1 << 20, 2, 4), Error::TooLarge { .. }));
        assert!(matches!(error(algorithm, usize::MAX, 2, usize::MAX), Error::TooLarge { .. }));
    }
    for algorithm in [Algorithm::ZbvZeroBubble, Algorithm::DualPipeV] {
        assert!(matches!(error(algorithm, 4, 1, 8), Error::StagesPerRank { needed: 2, .. }));
        assert!(matches!(error(algorithm, 4, 3, 8), Error::StagesPerRank { needed: 2, .. }));
    }
    for round in [0, 9] {
        assert!(matches!(
            error(Algorithm::Flexible { microbatches_per_round: round }, 4, 2, 8),
            Error::Round { microbatches: 8, .. }
        ));
    }
    assert_eq!(
        error(Algorithm::DualPipeV, 4, 1, 8).to_string(),
        "DualPipeV places 2 stages on each rank, not 1: ask for 2, or for Interleaved1F1B"
    );
}

/// Large, thin requests end in moments.
#[test]
fn thousands_of_ranks() {
    for algorithm in Algorithm::ALL.into_iter().chain([Algorithm::Flexible { microbatches_per_round: 1 }]) {
        let v_shaped = matches!(algorithm, Algorithm::ZbvZeroBubble | Algorithm::DualPipeV);
        let schedule = algorithm.generate(if v_shaped { 300 } else { 3000 }, 2, 2).unwrap();
        ferrotitan_schedule::verify(&schedule, &ferrotitan_schedule::Costs::default()).unwrap();
    }
}
