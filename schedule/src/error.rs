//! What goes wrong: with a request ([`Error`]) and with a schedule ([`Unsound`]).

use std::fmt;

use crate::action::{Action, Step};
use crate::lowered::Op;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why there is no schedule, or no picture.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No schedule has this name.
    #[error("no schedule is named `{name}`: {hint}")]
    UnknownName {
        /// What was asked for.
        name: String,
        /// The nearest name, or all of them.
        hint: String,
    },
    /// A size is zero.
    #[error("{what} is 0: give at least 1")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// More actions than anyone can mean.
    #[error(
        "{ranks} ranks of {stages_per_rank} stages with {microbatches} microbatches make more than {limit} forwards: \
         lower one of them"
    )]
    TooLarge {
        /// Ranks.
        ranks: usize,
        /// Stages a rank.
        stages_per_rank: usize,
        /// Microbatches.
        microbatches: usize,
        /// The most forwards a schedule may have.
        limit: usize,
    },
    /// The schedule is defined for one number of stages a rank.
    #[error(
        "{name} places {needed} stages on each rank, not {stages_per_rank}: ask for {needed}, or for Interleaved1F1B"
    )]
    StagesPerRank {
        /// The schedule.
        name: &'static str,
        /// Stages a rank that it is defined for.
        needed: usize,
        /// Stages a rank that were asked for.
        stages_per_rank: usize,
    },
    /// A round of the flexible schedule is longer than the batch, or empty.
    #[error("{microbatches_per_round} microbatches a round of {microbatches}: choose from 1 to {microbatches}")]
    Round {
        /// Consecutive microbatches of a stage's visit.
        microbatches_per_round: usize,
        /// Microbatches of the batch.
        microbatches: usize,
    },
    /// A CSV cannot be read.
    #[error("line {line}, column {column}: {reason}")]
    Csv {
        /// The line, from 1.
        line: usize,
        /// The character in the line, from 1.
        column: usize,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// A span of a timeline is not an interval, or not in order.
    #[error("the span of {step} on rank {rank} goes from {start} to {end}: {reason}")]
    Span {
        /// The rank.
        rank: usize,
        /// What ran.
        step: Step,
        /// When it started.
        start: f64,
        /// When it ended.
        end: f64,
        /// What would be right.
        reason: &'static str,
    },
    /// The schedule is unsound.
    #[error(transparent)]
    Unsound(#[from] Unsound),
}

/// Why a schedule must not be run: the first action that cannot run, where it stands, and the reason.
///
/// `rank` is where the action stands, `position` its step in that rank's list, from 0 (empty cells of a CSV not
/// counted).
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsound {
    /// No stages, or no microbatches.
    #[error("the schedule has {stages} stages and {microbatches} microbatches: it needs at least one of each")]
    Empty {
        /// Stages.
        stages: usize,
        /// Microbatches.
        microbatches: usize,
    },
    /// A stage lies on a rank that does not exist.
    #[error("stage {stage} is placed on rank {rank}, but there are {ranks} ranks: place it on a lower one")]
    Placement {
        /// The stage.
        stage: usize,
        /// Its rank.
        rank: usize,
        /// How many ranks there are.
        ranks: usize,
    },
    /// A rank without work.
    #[error("rank {rank} has no action: give it a stage, or use fewer ranks")]
    IdleRank {
        /// The rank.
        rank: usize,
    },
    /// An overlapped pair that is not a forward and a backward.
    #[error(
        "{step} (step {position} of rank {rank}) cannot run: a pair is a forward, then a backward or input gradient"
    )]
    Pair {
        /// The pair.
        step: Step,
        /// Its rank.
        rank: usize,
        /// Its place in the rank's list.
        position: usize,
    },
    /// A stage or microbatch that does not exist.
    #[error(
        "{action} (step {position} of rank {rank}) cannot run: the schedule has {stages} stages and {microbatches} \
         microbatches, counted from 0"
    )]
    OutOfRange {
        /// The action.
        action: Action,
        /// Its rank.
        rank: usize,
        /// Its place in the rank's list.
        position: usize,
        /// Stages of the schedule.
        stages: usize,
        /// Microbatches of the schedule.
        microbatches: usize,
    },
    /// An action on a rank that does not hold its stage.
    #[error("{action} (step {position} of rank {rank}) cannot run: stage {} is held by rank {home}", .action.stage)]
    WrongRank {
        /// The action.
        action: Action,
        /// Its rank.
        rank: usize,
        /// Its place in the rank's list.
        position: usize,
        /// The rank that holds the stage.
        home: usize,
    },
    /// An action twice.
    #[error("{action} (step {position} of rank {rank}) cannot run: it has run at step {first}")]
    Repeated {
        /// The action.
        action: Action,
        /// Its rank.
        rank: usize,
        /// The second place in the rank's list.
        position: usize,
        /// The first place in the rank's list.
        first: usize,
    },
    /// A full backward beside an input or weight gradient of the same stage and microbatch.
    #[error(
        "{action} (step {position} of rank {rank}) cannot run: {other} (step {first}) gives the same gradient; a full \
         backward is B, or I and W"
    )]
    BothBackwards {
        /// The later action.
        action: Action,
        /// Its rank.
        rank: usize,
        /// Its place in the rank's list.
        position: usize,
        /// The earlier action.
        other: Action,
        /// The earlier action's place.
        first: usize,
    },
    /// An action that never comes.
    #[error("{action} cannot run: it is missing from rank {rank}")]
    Missing {
        /// The action.
        action: Action,
        /// The rank that holds its stage.
        rank: usize,
    },
    /// Ranks that wait for each other, or a rank that waits for what it does later.
    #[error("{action} (step {position} of rank {rank}) cannot run: {}", explain(.chain))]
    Deadlock {
        /// The action.
        action: Action,
        /// Its rank.
        rank: usize,
        /// Its place in the rank's list.
        position: usize,
        /// Who waits for whom, from this action around to it.
        chain: Vec<Wait>,
    },
    /// A cost that is not a duration.
    #[error("the cost of {what} is {value}: give a number from 0 to 1e100")]
    Cost {
        /// Which cost.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// A hidden share of an overlapped pair that is not a share.
    #[error("the overlap is {overlap}: give the hidden share of a pair's shorter action, from 0 to 1")]
    Overlap {
        /// The share.
        overlap: f64,
    },
    /// A lowered list whose communication does not work out.
    #[error("{op} (operation {position} of rank {rank}) cannot run: {reason}")]
    Lowered {
        /// The operation.
        op: Op,
        /// Its rank.
        rank: usize,
        /// Its place in the rank's lowered list.
        position: usize,
        /// Why.
        reason: String,
    },
}

/// A rank that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The rank.
    pub rank: usize,
    /// Its next step.
    pub position: usize,
    /// The action of that step which cannot run.
    pub action: Action,
    /// The action that it needs.
    pub needs: Action,
    /// The rank that holds what it needs.
    pub holder: usize,
}

fn explain(chain: &[Wait]) -> String {
    struct Link<'a>(&'a Wait);
    impl fmt::Display for Link<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let Wait { rank, action, needs, holder, .. } = self.0;
            match rank == holder {
                true => write!(f, "{action} needs {needs}, which does not come before it on rank {rank}"),
                false => write!(f, "{action} needs {needs} of rank {holder}"),
            }
        }
    }
    let links: Vec<String> = chain.iter().map(|wait| Link(wait).to_string()).collect();
    match chain.len() {
        0 | 1 => links.concat(),
        _ => format!("the ranks wait for each other: {}", links.join("; ")),
    }
}
