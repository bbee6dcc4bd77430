//! What can go wrong in a pipeline.

use ferrotitan_comm::BoxError;
use ferrotitan_schedule::Op;
use tch::TchError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A message, or a group, failed.
    #[error(transparent)]
    Comm(#[from] ferrotitan_comm::Error),
    /// A layer or a parameter failed.
    #[error(transparent)]
    Model(#[from] ferrotitan_nn::Error),
    /// The shim over libtorch failed.
    #[error(transparent)]
    Ext(#[from] ferrotitan_ext::Error),
    /// libtorch refused an operation.
    #[error("{context}: {source}")]
    Torch {
        /// Which step.
        context: &'static str,
        /// libtorch's own words.
        source: TchError,
    },
    /// The schedule could not be run.
    #[error(transparent)]
    Unsound(#[from] ferrotitan_schedule::Unsound),
    /// A model cannot be cut as it was asked for.
    #[error("the model cannot be split into stages: {}", reasons.join("; "))]
    Split {
        /// Everything that is wrong, and what would be right.
        reasons: Vec<String>,
    },
    /// The schedule was made for another number of ranks.
    #[error(
        "schedule {schedule} is for {needed} ranks, but the mesh has {found} along pp: give a schedule for {found} \
         ranks, or set pp to {needed}"
    )]
    Ranks {
        /// The schedule's name.
        schedule: String,
        /// Ranks of the schedule.
        needed: usize,
        /// Ranks of the mesh along pp.
        found: usize,
    },
    /// A rank was given other stages than the schedule places on it.
    #[error("rank {rank} along pp was given stages {given:?}, but schedule {schedule} places {needed:?} there")]
    Stages {
        /// The schedule's name.
        schedule: String,
        /// The rank's index along pp.
        rank: usize,
        /// The stages that it was given.
        given: Vec<usize>,
        /// The stages that it should have been given.
        needed: Vec<usize>,
    },
    /// A step was given more or fewer microbatches than its schedule has.
    #[error(
        "schedule {schedule} is for {needed} microbatches, but the step was given {given}: cut the batch into {needed}"
    )]
    Microbatches {
        /// The schedule's name.
        schedule: String,
        /// Microbatches of the schedule.
        needed: usize,
        /// Microbatches that were given.
        given: usize,
    },
    /// A batch cannot be cut into equal microbatches.
    #[error(
        "a batch of {rows} sequences cannot be cut into {microbatches} microbatches: choose a number of microbatches \
         that divides {rows}"
    )]
    Indivisible {
        /// Sequences of the batch.
        rows: usize,
        /// Microbatches that were asked for.
        microbatches: usize,
    },
    /// What a stage gave, or got back, is not what was said to travel between stages.
    #[error(
        "stage {stage} sends {got} for microbatch {microbatch}, but its receiver expects {expected}: state the shape and \
         dtype that the layers give in `Activations`"
    )]
    Activations {
        /// The stage that sends.
        stage: usize,
        /// The microbatch.
        microbatch: usize,
        /// Shape and dtype of the tensor.
        got: String,
        /// Shape and dtype that were stated.
        expected: String,
    },
    /// The last stage has nothing to compare with.
    #[error("microbatch {microbatch} has no labels: the last stage of a pipeline computes the loss")]
    NoLabels {
        /// The microbatch.
        microbatch: usize,
    },
    /// A tensor is not where the schedule says that it is. A checked schedule never leads here.
    #[error("{what} is not there: run a schedule that `Lowered::check` accepts")]
    Absent {
        /// What was looked for.
        what: String,
    },
    /// An operation of the schedule failed.
    #[error("{op} on rank {rank} along pp: {source}")]
    Operation {
        /// The operation; of an overlapped pair, the action.
        op: Op,
        /// The rank's index along pp.
        rank: usize,
        /// Why.
        source: Box<Error>,
    },
    /// What the owner of the parameters was asked to do failed.
    #[error("hook {hook}: {source}")]
    Hook {
        /// The method of [`StageHooks`](crate::StageHooks).
        hook: &'static str,
        /// Its own error.
        source: BoxError,
    },
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names the step that an operation of libtorch failed in.
pub(crate) trait Context<T> {
    fn context(self, context: &'static str) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, TchError> {
    fn context(self, context: &'static str) -> Result<T> {
        self.map_err(|source| Error::Torch { context, source })
    }
}

/// As an error of a transform.
impl From<Error> for ferrotitan_nn::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Model(error) => error,
            error => ferrotitan_nn::Error::Other { context: "pipeline stages".into(), source: error.into() },
        }
    }
}
