//! Schedules that finish all forwards before the first backward.

use crate::action::{Action, Step};

/// All forwards, then all backwards in the same order of microbatches.
pub(crate) fn gpipe(ranks: usize, rank: usize, stages_per_rank: usize, microbatches: usize) -> Vec<Step> {
    let backwards = stages(ranks, rank, stages_per_rank)
        .rev()
        .flat_map(|stage| (0..microbatches).map(move |microbatch| Action::backward(stage, microbatch)));
    forwards(ranks, rank, stages_per_rank, microbatches).chain(backwards).map(Step::from).collect()
}

/// All forwards, then all backwards in the opposite order of microbatches.
pub(crate) fn looped(ranks: usize, rank: usize, stages_per_rank: usize, microbatches: usize) -> Vec<Step> {
    let backwards = stages(ranks, rank, stages_per_rank)
        .rev()
        .flat_map(|stage| (0..microbatches).rev().map(move |microbatch| Action::backward(stage, microbatch)));
    forwards(ranks, rank, stages_per_rank, microbatches).chain(backwards).map(Step::from).collect()
}

fn stages(ranks: usize, rank: usize, stages_per_rank: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..stages_per_rank).map(move |visit| visit * ranks + rank)
}

fn forwards(ranks: usize, rank: usize, stages_per_rank: usize, microbatches: usize) -> impl Iterator<Item = Action> {
    stages(ranks, rank, stages_per_rank)
        .flat_map(move |stage| (0..microbatches).map(move |microbatch| Action::forward(stage, microbatch)))
}
