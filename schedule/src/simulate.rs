//! Runs a schedule against a clock.

use std::collections::VecDeque;

use crate::action::{Action, Kind, Schedule, Step};
use crate::costs::Costs;
use crate::error::{Unsound, Wait};
use crate::structure;
use crate::timeline::{Span, Timeline};

/// When each step starts and ends if actions take as long as `costs` says: a rank does its steps in order, each as
/// soon as it has done the one before and all inputs are there. Both actions of a pair start together and end
/// together.
///
/// # Errors
/// [`Unsound`] if the schedule could not be run, or a cost is not a duration.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline, Unsound> {
    costs.check()?;
    let spans = run(schedule, |step| costs.step(step), costs.communication)?;
    Ok(Timeline::new(schedule.name.clone(), "", spans)
        .expect("a simulated rank does one step after the other, at finite times since costs are bounded"))
}

/// [`simulate`] with any durations.
pub(crate) fn run(
    schedule: &Schedule,
    duration: impl Fn(Step) -> f64,
    communication: f64,
) -> Result<Vec<Vec<Span>>, Unsound> {
    structure::check(schedule)?;
    let table = || vec![None; schedule.stages() * schedule.microbatches];
    let mut clock = Clock { schedule, communication, forwards: table(), gradients: table() };
    let mut spans: Vec<Vec<Span>> = schedule.ranks.iter().map(|steps| Vec::with_capacity(steps.len())).collect();

    let mut ready: VecDeque<usize> = (0..schedule.ranks.len()).collect();
    while let Some(rank) = ready.pop_front() {
        while let Some(&step) = schedule.ranks[rank].get(spans[rank].len()) {
            let Ok(inputs) = clock.inputs(rank, step) else { break };
            let start = spans[rank].last().map_or(inputs, |before| inputs.max(before.end));
            let end = start + duration(step);
            spans[rank].push(Span { step, start, end });
            for action in step.actions() {
                clock.finish(action, end);
                ready.extend(dependants(schedule, action).filter(|&other| other != rank));
            }
        }
    }
    let stalled = |rank: &usize| spans[*rank].len() < schedule.ranks[*rank].len();
    match (0..schedule.ranks.len()).find(stalled) {
        None => Ok(spans),
        Some(rank) => Err(deadlock(&clock, &spans, rank)),
    }
}

/// What an action needs to have been done.
pub(crate) fn needs(action: Action, stages: usize) -> impl Iterator<Item = Need> {
    let Action { kind, stage, microbatch } = action;
    let (first, second) = match kind {
        Kind::Forward => (stage.checked_sub(1).map(|before| Need::Forward { stage: before, microbatch }), None),
        Kind::WeightGradient => (Some(Need::Gradient { stage, microbatch }), None),
        Kind::Backward | Kind::InputGradient => {
            let after = (stage + 1 < stages).then_some(Need::Gradient { stage: stage + 1, microbatch });
            (Some(Need::Forward { stage, microbatch }), after)
        }
    };
    first.into_iter().chain(second)
}

/// What an action needs.
#[derive(Clone, Copy)]
pub(crate) enum Need {
    /// The outputs of a stage.
    Forward { stage: usize, microbatch: usize },
    /// The gradients of a stage's inputs, from its full backward or its input gradient.
    Gradient { stage: usize, microbatch: usize },
}

/// The ranks that hold the stages which take what an action gives.
fn dependants(schedule: &Schedule, action: Action) -> impl Iterator<Item = usize> {
    let stage = match action.kind {
        Kind::Forward => Some(action.stage + 1),
        Kind::Backward | Kind::InputGradient => action.stage.checked_sub(1),
        Kind::WeightGradient => None,
    };
    stage.and_then(|stage| schedule.placement.get(stage).copied()).into_iter()
}

struct Clock<'a> {
    schedule: &'a Schedule,
    communication: f64,
    /// When a stage's forward on a microbatch ended, at `stage * microbatches + microbatch`.
    forwards: Vec<Option<f64>>,
    /// When the gradient of its inputs was there.
    gradients: Vec<Option<f64>>,
}

impl Clock<'_> {
    /// When all inputs of a step are on its rank; or an action of it, and what that lacks.
    fn inputs(&self, rank: usize, step: Step) -> Result<f64, (Action, Need)> {
        let mut all = 0.0_f64;
        for action in step.actions() {
            for need in needs(action, self.schedule.stages()) {
                let (stage, end) = match need {
                    Need::Forward { stage, microbatch } => (stage, self.forwards[self.at(stage, microbatch)]),
                    Need::Gradient { stage, microbatch } => (stage, self.gradients[self.at(stage, microbatch)]),
                };
                let end = end.ok_or((action, need))?;
                let travels = self.schedule.placement[stage] != rank;
                all = all.max(if travels { end + self.communication } else { end });
            }
        }
        Ok(all)
    }

    fn finish(&mut self, action: Action, end: f64) {
        let at = self.at(action.stage, action.microbatch);
        match action.kind {
            Kind::Forward => self.forwards[at] = Some(end),
            Kind::Backward | Kind::InputGradient => self.gradients[at] = Some(end),
            Kind::WeightGradient => {}
        }
    }

    fn at(&self, stage: usize, microbatch: usize) -> usize {
        stage * self.schedule.microbatches + microbatch
    }
}

/// Follows who waits for whom from a stalled rank until a rank comes up again. Of that circle, the action that stands
/// first in its rank's list is the one to name.
fn deadlock(clock: &Clock<'_>, spans: &[Vec<Span>], stalled: usize) -> Unsound {
    let schedule = clock.schedule;
    let mut chain: Vec<Wait> = Vec::new();
    let mut rank = stalled;
    let circle = loop {
        if let Some(start) = chain.iter().position(|wait| wait.rank == rank) {
            break start;
        }
        let position = spans[rank].len();
        let step = schedule.ranks[rank][position];
        let Err((action, need)) = clock.inputs(rank, step) else { unreachable!("only a stalled rank is waited for") };
        let (stage, needs) = match need {
            Need::Forward { stage, microbatch } => (stage, Action::forward(stage, microbatch)),
            Need::Gradient { stage, microbatch } => {
                let full = Action::backward(stage, microbatch);
                let split = Action::input_gradient(stage, microbatch);
                let is_full = schedule.actions(schedule.placement[stage]).any(|action| action == full);
                (stage, if is_full { full } else { split })
            }
        };
        let holder = schedule.placement[stage];
        chain.push(Wait { rank, position, action, needs, holder });
        rank = holder;
    };
    chain.drain(..circle);
    let first = (0..chain.len()).min_by_key(|&at| chain[at].position).unwrap_or(0);
    chain.rotate_left(first);
    let Wait { rank, position, action, .. } = chain[0];
    Unsound::Deadlock { action, rank, position, chain }
}
