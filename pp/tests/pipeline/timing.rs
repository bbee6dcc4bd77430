//! Stages that sleep: a step takes as long as the verifier says.

use std::time::Duration;

use ferrotitan_pp::comm::DeviceMesh;
use ferrotitan_pp::schedule::Algorithm;

use crate::harness::{run, run_over_gloo};
use crate::models::sleepers::{RANKS, Timed, assert_saved};

/// What a forward, an input gradient and a weight gradient of a stage take each.
const UNIT: Duration = Duration::from_millis(12);
const ATTEMPTS: usize = 8;

/// In units.
fn measure(timed: &Timed, enough: f64, over_gloo: bool) -> f64 {
    let body = |mesh: DeviceMesh| timed.measure(&mesh, UNIT, ATTEMPTS, enough);
    if over_gloo { run_over_gloo(RANKS, body)[0] } else { run(RANKS, body)[0] }
}

fn check(algorithm: Algorithm, over_gloo: bool) {
    let timed = Timed::new(algorithm);
    let found = measure(&timed, 1.1, over_gloo);
    eprintln!("{algorithm}, over Gloo {over_gloo}: {found:.1} units, the verifier says {}", timed.makespan);
    timed.assert_near(found);
}

#[test]
fn a_step_takes_what_the_verifier_says() {
    Algorithm::ALL.into_iter().for_each(|algorithm| check(algorithm, false));
}

#[test]
fn over_gloo_too() {
    [Algorithm::Interleaved1F1B, Algorithm::Zb1p].into_iter().for_each(|algorithm| check(algorithm, true));
}

#[test]
fn zero_bubble_beats_1f1b_by_what_the_formulas_say() {
    let [plain, zero] = [Algorithm::OneForwardOneBackward, Algorithm::Zb1p]
        .map(|algorithm| (algorithm, measure(&Timed::new(algorithm), 1.03, false)));
    assert_saved(plain, zero);
}
