//! Bubbles and activations against the formulas of the papers.
#![allow(clippy::unwrap_used)]

use ferrotitan_schedule::{Algorithm, Costs, Report, verify};

/// F, I and W of a rank's layers.
const TIMES: [[f64; 3]; 3] = [[1.0, 1.0, 1.0], [1.0, 1.25, 0.75], [2.0, 2.5, 1.5]];

fn costs(stages_per_rank: usize, [forward, input_gradient, weight_gradient]: [f64; 3]) -> Costs {
    let share = |time: f64| time / stages_per_rank as f64;
    Costs {
        forward: share(forward),
        input_gradient: share(input_gradient),
        weight_gradient: share(weight_gradient),
        ..Costs::default()
    }
}

fn report(algorithm: Algorithm, sizes: [usize; 3], costs: &Costs) -> Report {
    let [ranks, stages_per_rank, microbatches] = sizes;
    verify(&algorithm.generate(ranks, stages_per_rank, microbatches).unwrap(), costs).unwrap()
}

/// Compares bubbles for all sizes for which `bubble` gives one, from P, V, M and F, I, W.
fn check(algorithm: Algorithm, stages_per_rank: &[usize], bubble: impl Fn([usize; 3], [f64; 3]) -> Option<f64>) {
    let mut checked = 0;
    for ranks in 1..=6 {
        for &stages_per_rank in stages_per_rank {
            for microbatches in 1..=18 {
                for times in TIMES {
                    let sizes = [ranks, stages_per_rank, microbatches];
                    let Some(expected) = bubble(sizes, times) else { continue };
                    let timeline = report(algorithm, sizes, &costs(stages_per_rank, times)).timeline;
                    let ideal = microbatches as f64 * times.iter().sum::<f64>();
                    assert!((timeline.ideal() - ideal).abs() < 1e-9, "{algorithm} {sizes:?}");
                    let bubble = timeline.bubble();
                    assert!(
                        (bubble - expected).abs() < 1e-9,
                        "{algorithm} {sizes:?} {times:?}: {bubble}, not {expected}"
                    );
                    checked += 1;
                }
            }
        }
    }
    assert!(checked >= 50);
}

/// (P-1)(F+I+W)/V.
fn full([ranks, stages_per_rank, _]: [usize; 3], times: [f64; 3]) -> f64 {
    (ranks - 1) as f64 * times.iter().sum::<f64>() / stages_per_rank as f64
}

#[test]
fn gpipe_and_looped_bfs() {
    check(Algorithm::GPipe, &[1], |sizes, times| Some(full(sizes, times)));
    // Where all microbatches of a stage fill the pipeline.
    check(Algorithm::LoopedBfs, &[1, 2, 3], |sizes, times| (sizes[2] >= sizes[0]).then(|| full(sizes, times)));
}

#[test]
fn one_forward_one_backward() {
    check(Algorithm::OneForwardOneBackward, &[1], |sizes, times| Some(full(sizes, times)));
    for ranks in 1..=6 {
        for microbatches in 1..=12 {
            let report = report(Algorithm::OneForwardOneBackward, [ranks, 1, microbatches], &Costs::default());
            for (rank, figures) in report.ranks.iter().enumerate() {
                assert_eq!(figures.peak_live, microbatches.min(ranks - rank));
                assert_eq!(figures.peak_held, figures.peak_live);
            }
        }
    }
}

#[test]
fn interleaved() {
    check(Algorithm::Interleaved1F1B, &[1, 2, 3], |sizes, times| (sizes[2] >= sizes[0]).then(|| full(sizes, times)));
    let report = report(Algorithm::Interleaved1F1B, [4, 2, 8], &Costs::default());
    assert_eq!(report.ranks.iter().map(|rank| rank.peak_live).collect::<Vec<_>>(), [11, 9, 7, 5]);
}

#[test]
fn flexible() {
    for round in 1..=6 {
        check(Algorithm::Flexible { microbatches_per_round: round }, &[1, 2, 3], |sizes, times| {
            let [ranks, _, microbatches] = sizes;
            let whole = round >= ranks && round <= microbatches && microbatches.is_multiple_of(round);
            whole.then(|| full(sizes, times))
        });
    }
    // With a round of P it is PyTorch's.
    let flexible = Algorithm::Flexible { microbatches_per_round: 4 }.generate(4, 2, 8).unwrap();
    assert_eq!(flexible.ranks, Algorithm::Interleaved1F1B.generate(4, 2, 8).unwrap().ranks);
}

#[test]
fn examples_of_llama_3() {
    let flexible =
        |round, sizes, costs: &Costs| report(Algorithm::Flexible { microbatches_per_round: round }, sizes, costs);
    let timeline = flexible(5, [4, 2, 10], &Costs::per_rank(2)).timeline;
    assert_eq!((timeline.makespan(), timeline.ideal()), (34.5, 30.0));
    // Fewer microbatches than ranks: the formula would say 50 %.
    let timeline = flexible(3, [4, 2, 3], &Costs::per_rank(2)).timeline;
    assert!((timeline.bubble_ratio() - 2.0 / 3.0).abs() < 1e-12);
    // Longer rounds hide communication, and hold more.
    let slow = Costs { communication: 0.1, ..Costs::per_rank(2) };
    for (round, makespan, peak) in [(4, 29.9, 11), (8, 29.1, 15)] {
        let report = flexible(round, [4, 2, 8], &slow);
        assert!((report.timeline.makespan() - makespan).abs() < 1e-9);
        assert_eq!(report.ranks[0].peak_live, peak);
    }
}

#[test]
fn a_short_last_round_still_fills_the_pipeline() {
    // Strict alternation would idle for 38 here.
    let timeline = report(Algorithm::Flexible { microbatches_per_round: 4 }, [4, 2, 17], &Costs::per_rank(2)).timeline;
    assert!(timeline.bubble() < 4.5 + 6.0, "{}", timeline.bubble());
}

#[test]
fn zero_bubble_in_a_line() {
    // (P-1)(F+I-W)/V.
    let expected = |[ranks, stages_per_rank, microbatches]: [usize; 3], [f, i, w]: [f64; 3]| {
        (microbatches >= ranks).then(|| (ranks - 1) as f64 * (f + i - w) / stages_per_rank as f64)
    };
    check(Algorithm::Zb1p, &[1], expected);
    check(Algorithm::InterleavedZeroBubble, &[1, 2, 3], expected);
    for ranks in 1..=6 {
        let zero_bubble = report(Algorithm::Zb1p, [ranks, 1, 12], &Costs::default());
        let one_forward = report(Algorithm::OneForwardOneBackward, [ranks, 1, 12], &Costs::default());
        for (rank, (zero_bubble, one_forward)) in zero_bubble.ranks.iter().zip(&one_forward.ranks).enumerate() {
            assert_eq!(zero_bubble.peak_live, one_forward.peak_live);
            // And it keeps what the weight gradients that it holds back need.
            assert!((zero_bubble.peak_live..=zero_bubble.peak_live + rank).contains(&zero_bubble.peak_held));
        }
    }
    let report = report(Algorithm::InterleavedZeroBubble, [4, 2, 8], &Costs::default());
    assert_eq!(report.ranks.iter().map(|rank| rank.peak_live).collect::<Vec<_>>(), [8, 7, 6, 5]);
}

#[test]
fn zero_bubble_in_a_v() {
    let expected = |[ranks, _, microbatches]: [usize; 3], times: [f64; 3]| {
        let even = times[0] == times[1] && times[1] == times[2];
        (even && microbatches >= 2 * ranks).then(|| (ranks - 1) as f64 * times[0] / 2.0)
    };
    check(Algorithm::ZbvZeroBubble, &[2], expected);
    for ranks in 1..=6 {
        let report = report(Algorithm::ZbvZeroBubble, [ranks, 2, 3 * ranks], &Costs::per_rank(2));
        // No rank idles between its first step and its last.
        assert_eq!(report.max_rank_span(), report.timeline.ideal());
        for rank in &report.ranks {
            assert_eq!(rank.peak_live, 2 * ranks);
        }
    }
}

#[test]
fn dual_pipe_v() {
    // (P-1)(F&B + B - 3W), with the times of one stage.
    for ranks in 1..=6 {
        for microbatches in [2 * ranks, 2 * ranks + 1, 3 * ranks, 4 * ranks] {
            for overlap in [0.0, 0.5, 1.0] {
                let costs = Costs { overlap, ..Costs::per_rank(2) };
                let report = report(Algorithm::DualPipeV, [ranks, 2, microbatches], &costs);
                let (forward, backward, weight) = (0.5, 1.0, 0.5);
                let pair = forward + backward - overlap * forward;
                let expected = (ranks - 1) as f64 * (pair + backward - 3.0 * weight);
                // Ranks overlap different numbers of pairs; the formula is of the rank that works least.
                let least = report.ranks.iter().map(|rank| rank.busy).fold(f64::INFINITY, f64::min);
                assert!(
                    (report.timeline.makespan() - least - expected).abs() < 1e-9,
                    "{ranks} {microbatches} {overlap}"
                );
                assert!(report.ranks.iter().all(|rank| rank.peak_live <= 2 * ranks + 1));
            }
        }
    }
    let report = report(Algorithm::DualPipeV, [4, 2, 8], &Costs::per_rank(2));
    assert_eq!((report.timeline.bubble(), report.timeline.ideal()), (3.0, 24.0));
}
