//! What can be said of a schedule without running it: every action is there once, on the rank that holds its stage.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::action::{Action, Kind, Schedule, Step};
use crate::error::Unsound;

/// Checks all that does not depend on the order of the steps. What passes has at least two actions for each stage and
/// microbatch, so tables of that size are no larger than the schedule.
pub(crate) fn check(schedule: &Schedule) -> Result<(), Unsound> {
    let (stages, microbatches, ranks) = (schedule.stages(), schedule.microbatches, schedule.ranks.len());
    if stages == 0 || microbatches == 0 {
        return Err(Unsound::Empty { stages, microbatches });
    }
    if let Some((stage, &rank)) = schedule.placement.iter().enumerate().find(|(_, rank)| **rank >= ranks) {
        return Err(Unsound::Placement { stage, rank, ranks });
    }
    if let Some(rank) = schedule.ranks.iter().position(Vec::is_empty) {
        return Err(Unsound::IdleRank { rank });
    }

    let mut positions: HashMap<Action, usize> = HashMap::new();
    for (rank, steps) in schedule.ranks.iter().enumerate() {
        for (position, &step) in steps.iter().enumerate() {
            if let Step::Pair { forward, backward } = step
                && (forward.kind != Kind::Forward || !backward.kind.gives_input_gradient())
            {
                return Err(Unsound::Pair { step, rank, position });
            }
            for action in step.actions() {
                if action.stage >= stages || action.microbatch >= microbatches {
                    return Err(Unsound::OutOfRange { action, rank, position, stages, microbatches });
                }
                let home = schedule.placement[action.stage];
                if home != rank {
                    return Err(Unsound::WrongRank { action, rank, position, home });
                }
                match positions.entry(action) {
                    Entry::Occupied(first) => {
                        return Err(Unsound::Repeated { action, rank, position, first: *first.get() });
                    }
                    Entry::Vacant(place) => place.insert(position),
                };
                let clash = rivals(action).find_map(|other| positions.get(&other).map(|&first| (other, first)));
                if let Some((other, first)) = clash {
                    return Err(Unsound::BothBackwards { action, rank, position, other, first });
                }
            }
        }
    }

    for stage in 0..stages {
        for microbatch in 0..microbatches {
            let missing = |action: &Action| !positions.contains_key(action);
            let forward = Action::forward(stage, microbatch);
            let full = Action::backward(stage, microbatch);
            let input = Action::input_gradient(stage, microbatch);
            let weight = Action::weight_gradient(stage, microbatch);
            let lacks = match () {
                () if missing(&forward) => forward,
                () if !missing(&full) => continue,
                () if missing(&input) && missing(&weight) => full,
                () if missing(&input) => input,
                () if missing(&weight) => weight,
                () => continue,
            };
            return Err(Unsound::Missing { action: lacks, rank: schedule.placement[stage] });
        }
    }
    Ok(())
}

/// The actions that give a gradient which this one gives too.
fn rivals(action: Action) -> impl Iterator<Item = Action> {
    let kinds: &[Kind] = match action.kind {
        Kind::Forward => &[],
        Kind::Backward => &[Kind::InputGradient, Kind::WeightGradient],
        Kind::InputGradient | Kind::WeightGradient => &[Kind::Backward],
    };
    kinds.iter().map(move |&kind| Action { kind, ..action })
}
