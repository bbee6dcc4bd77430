//! What can go wrong in Float8.

use tch::TchError;

use crate::{Operand, Recipe};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused an operation.
    #[error("{context}: {source}")]
    Torch {
        /// The step that failed.
        context: &'static str,
        /// libtorch's own words.
        source: TchError,
    },
    /// A group of ranks could not be had.
    #[error(transparent)]
    Group(#[from] ferrotitan_comm::Error),
    /// The ranks could not agree on a scale.
    #[error("{weight}: the largest magnitude over the ranks: {source}")]
    Comm {
        /// The projection's weight.
        weight: String,
        /// What the group said.
        source: ferrotitan_comm::Error,
    },
    /// A parameter could not be read.
    #[error(transparent)]
    Parameter(ferrotitan_nn::Error),
    /// An operand holds what no eight bits stand for.
    #[error("{weight}: {operand} has the largest magnitude {amax}; find where the NaN or the infinity comes from")]
    NotFinite {
        /// The projection's weight.
        weight: String,
        /// Which of its operands.
        operand: Operand,
        /// The largest magnitude, NaN where an element is.
        amax: f64,
    },
    /// A weight outgrew the scale that was computed for it.
    #[error(
        "{weight}: the largest magnitude is {found}, but its scale was computed for {known}; call precompute_scales \
         whenever weights have changed"
    )]
    Stale {
        /// The weight.
        weight: String,
        /// The largest magnitude of this rank's shard now.
        found: f64,
        /// The largest magnitude of all shards when the scale was computed.
        known: f64,
    },
    /// A weight arrived that this rank took no part in sending.
    #[error("{weight} cannot be decoded: this rank has encoded no shard of it, so it does not know the scale")]
    NeverSent {
        /// The weight.
        weight: String,
    },
    /// A filter that leaves nothing out, or all of it.
    #[error("{problem}; the projections are {}", names.join(", "))]
    Filter {
        /// What is wrong with it.
        problem: String,
        /// The names that it was held against.
        names: Vec<String>,
    },
    /// Another feature replaced the products before.
    #[error("{weight}: its products are replaced already; attach Float8 before what wraps products")]
    Taken {
        /// The projection's weight.
        weight: String,
    },
    /// A model that is divided among ranks needs the mesh to find the scales that all of them share.
    #[error("{weight} is divided among ranks; give the mesh with Float8::with_mesh")]
    NoMesh {
        /// The projection's weight.
        weight: String,
    },
    /// The transform was made for one rank and applied on another.
    #[error("made for {made_for}, but applied on {applied_to}")]
    OtherMesh {
        /// The rank and mesh that it was made for.
        made_for: String,
        /// Those that the model is on.
        applied_to: String,
    },
    /// Tensor parallelism cuts through a block of elements that share a scale.
    #[error(
        "{weight}: this rank's part of axis {axis} is {range:?}, which cuts blocks of {} elements; use fewer tp ranks, or \
         filter the projection out",
        crate::BLOCK
    )]
    CutBlock {
        /// The projection's weight.
        weight: String,
        /// The weight's axis.
        axis: usize,
        /// What this rank has of it.
        range: std::ops::Range<usize>,
    },
    /// Options that contradict each other.
    #[error("{setting} needs the recipe tensorwise, not {recipe}")]
    NeedsTensorwise {
        /// The setting.
        setting: &'static str,
        /// The recipe that was chosen.
        recipe: Recipe,
    },
    /// Scales can be computed ahead for weights that travel in Float8 alone.
    #[error("scales are computed ahead for the Float8 all-gather; switch it on as well")]
    NoWire,
    /// A history of no step.
    #[error("delayed scaling needs a history of at least one step")]
    NoHistory,
    /// Histories that were not written for this model.
    #[error("{weight}: no history of its largest magnitudes was given; restore what Handle::histories gave")]
    MissingHistory {
        /// The projection's weight.
        weight: String,
    },
    /// An operand of the wrong shape.
    #[error("a product takes matrices that share their last axis, not {left:?} and {right:?}")]
    Shape {
        /// Of the left operand.
        left: Vec<i64>,
        /// Of the right operand.
        right: Vec<i64>,
    },
    /// No such recipe.
    #[error("\"{text}\" is no Float8 recipe; there are {}", Recipe::ALL.map(Recipe::name).join(", "))]
    NoSuchRecipe {
        /// What was given.
        text: String,
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

impl From<Error> for ferrotitan_nn::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Parameter(error) => error,
            other => ferrotitan_nn::Error::Other { context: "float8".into(), source: other.into() },
        }
    }
}
