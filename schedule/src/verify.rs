//! Proves a schedule sound, and says what it costs.

use crate::action::{Kind, Schedule};
use crate::costs::Costs;
use crate::error::Unsound;
use crate::simulate::simulate;
use crate::timeline::Timeline;

/// What a sound schedule costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// When each step starts and ends; with the makespan, the ideal and the bubble.
    pub timeline: Timeline,
    /// Each rank's share.
    pub ranks: Vec<RankReport>,
}

/// What a sound schedule costs one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankReport {
    /// When its first step starts.
    pub start: f64,
    /// When its last step ends.
    pub end: f64,
    /// How long it works.
    pub busy: f64,
    /// The most activations it holds for input gradients at once: microbatches of one stage each, from the start of the
    /// forward to the end of the full backward or input gradient.
    pub peak_live: usize,
    /// The most it holds if activations are kept for weight gradients too: from the start of the forward to the end of
    /// the full backward or weight gradient. The same as `peak_live` where no backward is split.
    pub peak_held: usize,
}

impl RankReport {
    /// From the start of its first step to the end of its last.
    pub fn span(&self) -> f64 {
        self.end - self.start
    }
}

impl Report {
    /// The largest span of a rank: what a step costs where the next step's first forwards run while the last ranks
    /// still finish this one.
    pub fn max_rank_span(&self) -> f64 {
        self.ranks.iter().map(RankReport::span).fold(0.0, f64::max)
    }
}

/// Proves that a schedule can run: every action is there once, on the rank of its stage; each backward is full, or an
/// input and a weight gradient; and with every rank going through its list in order, nobody waits for ever. Since
/// sends do not block, that is all that [`lower`](crate::lower) needs to place messages that cannot block either.
///
/// The report's times are in the unit of `costs`.
///
/// # Errors
/// The first action that cannot run, where it stands, and why; or a cost that is not a duration.
pub fn verify(schedule: &Schedule, costs: &Costs) -> Result<Report, Unsound> {
    let timeline = simulate(schedule, costs)?;
    let ranks = (0..schedule.ranks.len()).map(|rank| {
        let spans = &timeline.ranks()[rank];
        RankReport {
            start: spans.first().map_or(0.0, |span| span.start),
            end: spans.last().map_or(0.0, |span| span.end),
            busy: timeline.busy(rank),
            peak_live: peak(schedule, rank, Kind::gives_input_gradient),
            peak_held: peak(schedule, rank, Kind::gives_weight_gradient),
        }
    });
    Ok(Report { ranks: ranks.collect(), timeline })
}

/// The most forwards without an action that frees them. In a pair, the forward allocates before the backward frees.
fn peak(schedule: &Schedule, rank: usize, frees: impl Fn(Kind) -> bool) -> usize {
    let mut held = 0_usize;
    let mut most = 0;
    for action in schedule.actions(rank) {
        if action.kind == Kind::Forward {
            held += 1;
            most = most.max(held);
        } else if frees(action.kind) {
            held -= 1;
        }
    }
    most
}
