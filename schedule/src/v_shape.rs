//! Schedules whose stages go down the ranks and back up: rank r holds stages r and 2P-1-r.
//!
//! Both are written for a full pipeline. With fewer microbatches they are generated for as many as fill it, and the
//! actions of those that do not exist are dropped: what remains is in an order that could be run, since no action waits
//! for one of another microbatch.

use std::collections::VecDeque;

use crate::action::{Action, Kind, Step};

/// The two stages of a rank: `Down` has the smaller number.
#[derive(Clone, Copy)]
enum Leg {
    Down,
    Up,
}
use Leg::{Down, Up};

/// Builds a rank's list. The microbatch of an action is the number of actions of its kind and leg before it.
struct Builder {
    stages: [usize; 2],
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// For each leg, the weight gradients whose input gradient has come, the oldest first, and where that stands.
    owed: [VecDeque<(usize, Action)>; 2],
    steps: Vec<Step>,
}

impl Builder {
    fn new(ranks: usize, rank: usize) -> Self {
        Self {
            stages: [rank, 2 * ranks - 1 - rank],
            forwards: [0; 2],
            backwards: [0; 2],
            owed: [VecDeque::new(), VecDeque::new()],
            steps: Vec::new(),
        }
    }

    fn next_forward(&mut self, leg: Leg) -> Action {
        let microbatch = &mut self.forwards[leg as usize];
        *microbatch += 1;
        Action::forward(self.stages[leg as usize], *microbatch - 1)
    }

    fn next_backward(&mut self, leg: Leg, kind: Kind) -> Action {
        let microbatch = &mut self.backwards[leg as usize];
        *microbatch += 1;
        Action::new(kind, self.stages[leg as usize], *microbatch - 1)
    }

    fn forward(&mut self, leg: Leg) {
        let action = self.next_forward(leg);
        self.steps.push(Step::One(action));
    }

    fn backward(&mut self, leg: Leg) {
        let action = self.next_backward(leg, Kind::Backward);
        self.steps.push(Step::One(action));
    }

    fn input_gradient(&mut self, leg: Leg) {
        let action = self.next_backward(leg, Kind::InputGradient);
        let weight_gradient = Action::weight_gradient(action.stage, action.microbatch);
        self.owed[leg as usize].push_back((self.steps.len(), weight_gradient));
        self.steps.push(Step::One(action));
    }

    fn either(&mut self, leg: Leg, split: bool) {
        match split {
            true => self.input_gradient(leg),
            false => self.backward(leg),
        }
    }

    fn overlap(&mut self, forward: Leg, backward: Leg) {
        let forward = self.next_forward(forward);
        let backward = self.next_backward(backward, Kind::Backward);
        self.steps.push(Step::Pair { forward, backward });
    }

    /// The oldest weight gradient that is owed, if any.
    fn oldest_weight_gradient(&mut self) {
        let since = |leg: Leg| self.owed[leg as usize].front().map_or(usize::MAX, |&(since, _)| since);
        self.weight_gradient(if since(Down) < since(Up) { Down } else { Up });
    }

    /// The oldest weight gradient that a leg owes, if any.
    fn weight_gradient(&mut self, leg: Leg) {
        let oldest = self.owed[leg as usize].pop_front();
        self.steps.extend(oldest.map(|(_, action)| Step::One(action)));
    }

    /// The steps, without microbatches that do not exist.
    fn finish(self, microbatches: usize) -> Vec<Step> {
        let exists = |action: &Action| action.microbatch < microbatches;
        let kept = self.steps.into_iter().filter_map(|step| match step {
            Step::Pair { forward, backward } if exists(&forward) && exists(&backward) => Some(step),
            _ => step.actions().find(exists).map(Step::One),
        });
        kept.collect()
    }
}

/// ZB-V: after a warm-up that fills all ranks, no rank idles until its last action.
pub(crate) fn zbv(ranks: usize, rank: usize, microbatches: usize) -> Vec<Step> {
    let full = microbatches.max(2 * ranks - 1);
    let to_turn = ranks - rank;
    let mut list = Builder::new(ranks, rank);
    (0..2 * to_turn - 1).for_each(|_| list.forward(Down));
    for _ in 0..rank {
        list.forward(Up);
        list.forward(Down);
    }
    let up = |list: &mut Builder| {
        list.forward(Up);
        list.input_gradient(Up);
        list.weight_gradient(Up);
    };
    (0..to_turn).for_each(|_| up(&mut list));
    while list.forwards[Up as usize] < full {
        if list.forwards[Down as usize] < full {
            list.forward(Down);
        }
        list.input_gradient(Down);
        list.weight_gradient(Down);
        up(&mut list);
    }
    for _ in 0..rank {
        list.input_gradient(Down);
        list.input_gradient(Up);
    }
    for _ in 0..to_turn {
        list.input_gradient(Down);
        list.weight_gradient(Down);
    }
    (0..full).for_each(|_| list.weight_gradient(Up));
    (0..full).for_each(|_| list.weight_gradient(Down));
    list.finish(microbatches)
}

/// DualPipeV, in the eight phases of its authors' code.
pub(crate) fn dual_pipe_v(ranks: usize, rank: usize, microbatches: usize) -> Vec<Step> {
    let full = microbatches.max(2 * ranks);
    let below = ranks - rank - 1;
    let mut list = Builder::new(ranks, rank);
    (0..2 * below).for_each(|_| list.forward(Down));
    for _ in 0..rank + 1 {
        list.forward(Down);
        list.forward(Up);
    }
    for _ in 0..below {
        list.input_gradient(Up);
        list.oldest_weight_gradient();
        list.forward(Up);
    }
    for pair in 0..full - 2 * ranks + rank + 1 {
        // At the turn of the V, the first backward is that of the forward just done: nothing to overlap it with.
        if pair == 0 && below == 0 {
            list.forward(Down);
            list.backward(Up);
        } else {
            list.overlap(Down, Up);
        }
        list.overlap(Up, Down);
    }
    for _ in 0..below {
        list.backward(Up);
        list.overlap(Up, Down);
    }
    // Half way through, weight gradients begin to be put off, to fill the gaps at the end.
    for pair in 0..rank + 1 {
        list.either(Up, 2 * pair > rank);
        list.either(Down, 2 * pair >= rank);
    }
    for _ in 0..below {
        list.oldest_weight_gradient();
        list.input_gradient(Down);
    }
    (0..rank + 1).for_each(|_| list.oldest_weight_gradient());
    list.finish(microbatches)
}
