//! What tests share: a way to draw any schedule, and a slow judge of schedules that shares nothing with the verifier.
#![allow(clippy::unwrap_used, dead_code)]

use std::collections::{BTreeMap, BTreeSet};

use ferrotitan_schedule::{Action, Algorithm, Kind, Schedule, Step};
use proptest::prelude::*;

/// An algorithm with sizes that it takes.
pub(crate) fn any_schedule() -> impl Strategy<Value = Schedule> {
    (0..9_usize, 1..=8_usize, 1..=4_usize, 1..=20_usize, any::<prop::sample::Index>()).prop_map(
        |(which, ranks, stages_per_rank, microbatches, round)| {
            let flexible = Algorithm::Flexible { microbatches_per_round: 1 + round.index(microbatches) };
            let algorithm = Algorithm::ALL.get(which).copied().unwrap_or(flexible);
            let v_shaped = matches!(algorithm, Algorithm::ZbvZeroBubble | Algorithm::DualPipeV);
            algorithm.generate(ranks, if v_shaped { 2 } else { stages_per_rank }, microbatches).unwrap()
        },
    )
}

/// Whether a schedule can run: counts what it should hold, draws every "must come before" between steps as an edge, and
/// looks for an order of all steps by taking away, again and again, any step without an edge into it.
pub(crate) fn is_sound(schedule: &Schedule) -> bool {
    let stages = schedule.placement.len();
    // Where each action stands.
    let mut places: BTreeMap<(usize, usize, char), Vec<(usize, usize)>> = BTreeMap::new();
    for (rank, steps) in schedule.ranks.iter().enumerate() {
        for (position, step) in steps.iter().enumerate() {
            if let Step::Pair { forward, backward } = step
                && !(forward.kind == Kind::Forward && matches!(backward.kind, Kind::Backward | Kind::InputGradient))
            {
                return false;
            }
            for action in step.actions() {
                let key = (action.stage, action.microbatch, action.kind.letter());
                places.entry(key).or_default().push((rank, position));
            }
        }
    }
    let mut expected = 0;
    for stage in 0..stages {
        for microbatch in 0..schedule.microbatches {
            let count = |letter| places.get(&(stage, microbatch, letter)).map_or(0, Vec::len);
            match (count('F'), count('B'), count('I'), count('W')) {
                (1, 1, 0, 0) => expected += 2,
                (1, 0, 1, 1) => expected += 3,
                _ => return false,
            }
        }
    }
    if places.values().map(Vec::len).sum::<usize>() != expected {
        return false;
    }
    if places.iter().any(|(&(stage, ..), at)| at[0].0 != schedule.placement[stage]) {
        return false;
    }
    if schedule.ranks.iter().any(Vec::is_empty) {
        return false;
    }

    let place =
        |stage: usize, microbatch: usize, letter: char| places.get(&(stage, microbatch, letter)).map(|at| at[0]);
    let gradient = |stage, microbatch| place(stage, microbatch, 'B').or_else(|| place(stage, microbatch, 'I')).unwrap();
    let mut edges: BTreeSet<((usize, usize), (usize, usize))> = BTreeSet::new();
    for stage in 0..stages {
        for microbatch in 0..schedule.microbatches {
            let forward = place(stage, microbatch, 'F').unwrap();
            if stage > 0 {
                edges.insert((place(stage - 1, microbatch, 'F').unwrap(), forward));
                edges.insert((gradient(stage, microbatch), gradient(stage - 1, microbatch)));
            }
            edges.insert((forward, gradient(stage, microbatch)));
            if let Some(weight) = place(stage, microbatch, 'W') {
                edges.insert((gradient(stage, microbatch), weight));
            }
        }
    }
    let mut nodes: BTreeSet<(usize, usize)> = BTreeSet::new();
    for (rank, steps) in schedule.ranks.iter().enumerate() {
        for position in 0..steps.len() {
            nodes.insert((rank, position));
            if position > 0 {
                edges.insert(((rank, position - 1), (rank, position)));
            }
        }
    }
    loop {
        let entered: BTreeSet<_> = edges.iter().map(|edge| edge.1).collect();
        let free: Vec<_> = nodes.difference(&entered).copied().collect();
        if free.is_empty() {
            return nodes.is_empty();
        }
        nodes.retain(|node| entered.contains(node));
        edges.retain(|edge| entered.contains(&edge.0));
    }
}

/// The actions of a step, for a change of one of them.
pub(crate) fn with_action(step: Step, second: bool, change: impl Fn(&mut Action)) -> Step {
    match step {
        Step::One(mut action) => {
            change(&mut action);
            Step::One(action)
        }
        Step::Pair { mut forward, mut backward } => {
            change(if second { &mut backward } else { &mut forward });
            Step::Pair { forward, backward }
        }
    }
}
