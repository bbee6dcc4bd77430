//! What can go wrong in sharding.

use tch::TchError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed.
    #[error("sharding unit {unit}: {source}")]
    Comm {
        /// The unit whose parameters or gradients were under way.
        unit: String,
        /// What the group said.
        source: ferrotitan_comm::Error,
    },
    /// A group of ranks could not be had.
    #[error(transparent)]
    Group(#[from] ferrotitan_comm::Error),
    /// A parameter could not be read or written.
    #[error(transparent)]
    Parameter(#[from] ferrotitan_nn::Error),
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
    /// A parameter cannot be divided.
    #[error("parameter {name} cannot be sharded: {source}")]
    Layout {
        /// The parameter's full name.
        name: String,
        /// What `mesh` found wrong.
        source: ferrotitan_mesh::Error,
    },
    /// A parameter has storage already, so that dividing it would save nothing.
    #[error("parameter {name} has storage already; shard the model before it is materialized")]
    Materialized {
        /// The parameter's full name.
        name: String,
    },
    /// A parameter's form on the way could not be made or read.
    #[error("the wire of parameter {name}: {source}")]
    Wire {
        /// The parameter's full name.
        name: String,
        /// The wire's own error.
        source: ferrotitan_comm::BoxError,
    },
    /// The number of ranks to reshard to does not fit the sharding group.
    #[error("cannot reshard to {ranks} ranks after forward; give a divisor of the {size} ranks that shard")]
    Ranks {
        /// What the options ask for.
        ranks: usize,
        /// Ranks that shard a parameter.
        size: usize,
    },
    /// The transform was made for another place in another mesh.
    #[error("made for {made_for}, but applied to {applied_to}; give the transform the mesh that the model is for")]
    OtherMesh {
        /// The mesh of the transform.
        made_for: String,
        /// The mesh it was applied with.
        applied_to: String,
    },
    /// No unit has that number.
    #[error("there is no unit {unit}; there are {count}, counted from 0")]
    NoSuchUnit {
        /// The number asked for.
        unit: usize,
        /// How many units there are.
        count: usize,
    },
    /// A unit has no parameters.
    #[error("unit {name} has no parameters; run what it computes without one")]
    Empty {
        /// The unit's name.
        name: String,
    },
    /// A setting is none of its choices.
    #[error("\"{text}\" is no way to reshard after forward; say default, always, never, or a number of ranks")]
    Setting {
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
            other => ferrotitan_nn::Error::Other { context: "sharding".into(), source: other.into() },
        }
    }
}
