//! Interleaved 1F1B where strict alternation would deadlock or idle: rounds shorter than the pipeline is deep.
//!
//! The forwards and the backwards of a rank keep their order, and a rank never holds more activations than in the
//! strict form; but which comes next is decided by what is there when the rank is free, in a simulation where a
//! backward takes as long as two forwards. Since every list is the record of a run, it can be run.
//!
//! The simulation cannot stall. Take the backward that is first by its place in its rank's order, and among equals
//! the one of the highest rank, of those not done. All that its microbatch's forwards wait for is done or allowed:
//! each rank has done as many backwards as this one's place, so the limit lets through every forward that comes no
//! more than (V-1)N places later, and the forward of the same microbatch and stage never comes later than that.

use std::collections::BTreeSet;

use crate::action::{Action, Step};
use crate::interleaved::Interleaving;

const FORWARD: usize = 1;
const BACKWARD: usize = 2;

/// Every rank's steps.
pub(crate) fn steps(order: &Interleaving) -> Vec<Vec<Step>> {
    let stages = order.ranks * order.stages_per_rank;
    let forwards = order.ranks * order.visits();
    let ranks = (0..order.ranks).map(|rank| Rank {
        forwards: order.forwards(rank),
        backwards: order.backwards(rank),
        limit: order.warm_up(rank) + 1,
        started: 0,
        finished: 0,
        free_at: 0,
        steps: Vec::with_capacity(2 * order.visits()),
    });
    let mut run = Run {
        ranks: ranks.collect(),
        stages,
        forward_ends: vec![None; forwards],
        backward_ends: vec![None; forwards],
        next_of_rank: vec![None; order.ranks],
        next: BTreeSet::new(),
    };
    (0..order.ranks).for_each(|rank| run.refresh(rank));
    while let Some(next) = run.next.first().copied() {
        run.step(next);
        // What has become possible by it is possible on this rank, or on those of the next and previous stage.
        run.refresh(next.rank);
        run.refresh((next.rank + 1) % order.ranks);
        run.refresh((next.rank + order.ranks - 1) % order.ranks);
    }
    run.ranks.into_iter().map(|rank| rank.steps).collect()
}

struct Rank {
    forwards: Vec<Action>,
    backwards: Vec<Action>,
    /// How many forwards may be without their backward.
    limit: usize,
    /// Forwards done.
    started: usize,
    /// Backwards done.
    finished: usize,
    free_at: usize,
    steps: Vec<Step>,
}

struct Run {
    ranks: Vec<Rank>,
    stages: usize,
    /// When a stage's forward on a microbatch ended, at `microbatch * stages + stage`.
    forward_ends: Vec<Option<usize>>,
    /// The same of backwards.
    backward_ends: Vec<Option<usize>>,
    next_of_rank: Vec<Option<Candidate>>,
    /// The same, in the order in which they are taken.
    next: BTreeSet<Candidate>,
}

/// A step that can start. The earliest is taken; of a forward and a backward at the same time, the forward.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    start: usize,
    is_backward: bool,
    rank: usize,
}

impl Run {
    fn at(&self, action: Action) -> usize {
        action.microbatch * self.stages + action.stage
    }

    /// Looks again at what a rank can do next.
    fn refresh(&mut self, rank: usize) {
        let state = &self.ranks[rank];
        let candidate = |inputs: Option<usize>, is_backward| {
            inputs.map(|inputs| Candidate { start: inputs.max(state.free_at), is_backward, rank })
        };
        let forward = candidate(self.forward_inputs(state), false);
        let backward = candidate(self.backward_inputs(state), true);
        let next = forward.into_iter().chain(backward).min();
        if let Some(before) = std::mem::replace(&mut self.next_of_rank[rank], next) {
            self.next.remove(&before);
        }
        self.next.extend(next);
    }

    /// When the inputs of a rank's next forward are there, if it has one and may run it.
    fn forward_inputs(&self, rank: &Rank) -> Option<usize> {
        let action = *rank.forwards.get(rank.started).filter(|_| rank.started - rank.finished < rank.limit)?;
        match action.stage {
            0 => Some(0),
            _ => self.forward_ends[self.at(action) - 1],
        }
    }

    fn backward_inputs(&self, rank: &Rank) -> Option<usize> {
        let action = *rank.backwards.get(rank.finished)?;
        let forward = self.forward_ends[self.at(action)]?;
        match action.stage + 1 == self.stages {
            true => Some(forward),
            false => self.backward_ends[self.at(action) + 1].map(|gradient| gradient.max(forward)),
        }
    }

    fn step(&mut self, next: Candidate) {
        let rank = &mut self.ranks[next.rank];
        let (action, done, duration) = match next.is_backward {
            true => (rank.backwards[rank.finished], &mut rank.finished, BACKWARD),
            false => (rank.forwards[rank.started], &mut rank.started, FORWARD),
        };
        *done += 1;
        rank.free_at = next.start + duration;
        rank.steps.push(Step::One(action));
        let end = Some(rank.free_at);
        let at = self.at(action);
        match next.is_backward {
            true => self.backward_ends[at] = end,
            false => self.forward_ends[at] = end,
        }
    }
}
