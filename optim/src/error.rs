//! What can go wrong in a step.

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter could not be read or written.
    #[error(transparent)]
    Parameter(#[from] ferrotitan_nn::Error),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] ferrotitan_comm::Error),
    /// The fused kernel failed.
    #[error(transparent)]
    Ext(#[from] ferrotitan_ext::Error),
    /// libtorch refused an operation.
    #[error("{context}: {source}")]
    Torch {
        /// Which step.
        context: &'static str,
        /// libtorch's own words.
        source: tch::TchError,
    },
    /// A pattern of a parameter group is no glob.
    #[error("parameter pattern {pattern:?} cannot be read: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A pattern of a parameter group matches nothing, so that the group would silently do nothing.
    #[error("parameter pattern {pattern:?} matches no parameter; there are {known}")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// Some of the parameters' names.
        known: String,
    },
    /// A setting is out of its range.
    #[error("{name} is {value}, but must be {range}")]
    Range {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        range: &'static str,
    },
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
