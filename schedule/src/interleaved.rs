//! One forward, one backward, over one or several stages a rank: 1F1B, its interleaved form, and the zero-bubble forms
//! of both.
//!
//! A batch is cut into rounds. In a round a rank takes all of the round's microbatches through its first stage, then
//! through its second, and so on; backwards visit the stages from the last to the first. That fixes the order of the
//! forwards and that of the backwards. What remains is where the one goes over into the other: after a warm-up of
//! forwards, a rank alternates.

use crate::action::{Action, Kind, Step};

/// The order of an interleaved schedule, the same for all ranks but for the stages' numbers and the warm-up.
#[derive(Clone, Debug)]
pub(crate) struct Interleaving {
    /// P.
    pub(crate) ranks: usize,
    /// V.
    pub(crate) stages_per_rank: usize,
    /// How many microbatches each round has.
    rounds: Vec<usize>,
    /// How many forwards more than its successor a rank runs before its first backward. One would do if data moved at
    /// once; with two, a rank never waits for a message that left one action ago.
    warm_up_per_rank: usize,
    /// Backwards are split, and weight gradients put off.
    zero_bubble: bool,
}

impl Interleaving {
    /// An order over rounds.
    pub(crate) fn new(ranks: usize, stages_per_rank: usize, rounds: &[usize], zero_bubble: bool) -> Self {
        let warm_up_per_rank = if zero_bubble { 1 } else { 2 };
        Self { ranks, stages_per_rank, rounds: rounds.to_vec(), warm_up_per_rank, zero_bubble }
    }

    /// The same, where no rank runs further ahead than the pipeline is deep: plain 1F1B.
    pub(crate) fn with_shortest_warm_up(self) -> Self {
        Self { warm_up_per_rank: 1, ..self }
    }

    /// Rounds of at least `least` microbatches, as short and as even as that allows; one round where there are fewer.
    pub(crate) fn rounds_of_at_least(least: usize, microbatches: usize) -> Vec<usize> {
        let rounds = (microbatches / least).max(1);
        let (length, longer) = (microbatches / rounds, microbatches % rounds);
        (0..rounds).map(|round| length + usize::from(round < longer)).collect()
    }

    /// Rounds of exactly `length` microbatches, and a last one of what remains.
    pub(crate) fn rounds_of(length: usize, microbatches: usize) -> Vec<usize> {
        let mut rounds = vec![length; microbatches / length];
        if !microbatches.is_multiple_of(length) {
            rounds.push(microbatches % length);
        }
        rounds
    }

    /// How many forwards a rank runs in all, and as many backwards.
    pub(crate) fn visits(&self) -> usize {
        self.rounds.iter().sum::<usize>() * self.stages_per_rank
    }

    /// How many forwards a rank runs before the first pair of a forward and a backward: those of the first round up to
    /// its last stage, and some for the way of the first microbatch to the last rank and back.
    pub(crate) fn warm_up(&self, rank: usize) -> usize {
        let longest = self.rounds.iter().copied().max().unwrap_or(0);
        let way = self.warm_up_per_rank * (self.ranks - 1 - rank);
        self.visits().min((self.stages_per_rank - 1) * longest + way)
    }

    /// Whether a rank that alternates strictly after its warm-up never waits for one that waits for it.
    ///
    /// From its last stage but one, the last rank hands a backward to the first rank, which does it only after
    /// `warm_up(0)` forwards; these wait for forwards that the last rank does after its own backwards. The two meet
    /// unless two neighbouring rounds together outlast the difference of the warm-ups, 2(P-1).
    pub(crate) fn warm_up_suffices(&self) -> bool {
        self.rounds.len() == 1 || self.stages_per_rank == 1 || self.rounds.iter().all(|&round| round >= self.ranks)
    }

    /// A rank's forwards, in order.
    pub(crate) fn forwards(&self, rank: usize) -> Vec<Action> {
        self.visit(|visit| visit * self.ranks + rank, Kind::Forward)
    }

    /// A rank's backwards, in order: input gradients where the backward is split.
    pub(crate) fn backwards(&self, rank: usize) -> Vec<Action> {
        let kind = if self.zero_bubble { Kind::InputGradient } else { Kind::Backward };
        self.visit(|visit| (self.stages_per_rank - 1 - visit) * self.ranks + rank, kind)
    }

    fn visit(&self, stage_of_visit: impl Fn(usize) -> usize, kind: Kind) -> Vec<Action> {
        let mut actions = Vec::with_capacity(self.visits());
        let mut start = 0;
        for round in &self.rounds {
            for visit in 0..self.stages_per_rank {
                let stage = stage_of_visit(visit);
                actions.extend((start..start + round).map(|microbatch| Action::new(kind, stage, microbatch)));
            }
            start += round;
        }
        actions
    }

    /// A rank's steps: its warm-up, then a forward and a backward by turns, then the backwards that remain.
    ///
    /// In the zero-bubble form, rank r holds back r weight gradients: as many as it will have gaps to fill at the end,
    /// while the last gradients make their way down to rank 0.
    pub(crate) fn steps(&self, rank: usize) -> Vec<Step> {
        let forwards = self.forwards(rank);
        let (warm_up, mut rest) = forwards.split_at(self.warm_up(rank));
        let mut steps: Vec<Step> = warm_up.iter().copied().map(Step::One).collect();
        let backwards = self.backwards(rank);
        let weight = |of: &Action| Step::One(Action::weight_gradient(of.stage, of.microbatch));
        for (done, &backward) in backwards.iter().enumerate() {
            if let Some((&forward, later)) = rest.split_first() {
                steps.push(Step::One(forward));
                rest = later;
            }
            steps.push(Step::One(backward));
            if self.zero_bubble && done >= rank {
                steps.push(weight(&backwards[done - rank]));
            }
        }
        if self.zero_bubble {
            let held_back = rank.min(backwards.len());
            steps.extend(backwards[backwards.len() - held_back..].iter().map(weight));
        }
        steps
    }
}
