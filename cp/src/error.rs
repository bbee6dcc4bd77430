//! What can go wrong in context parallelism.

use tch::TchError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused an operation.
    #[error("{context}: {source}")]
    Torch {
        /// The step that was under way.
        context: &'static str,
        /// libtorch's own words.
        source: TchError,
    },
    /// The autograd engine refused a function.
    #[error(transparent)]
    Ext(#[from] ferrotitan_ext::Error),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] ferrotitan_comm::Error),
    /// A tensor does not fit the others, or the sharding.
    #[error("context parallel {what}: got {got}, expected {expected}")]
    Shape {
        /// What was being done.
        what: &'static str,
        /// What was given.
        got: String,
        /// What would be right.
        expected: String,
    },
    /// Ranges that deal no sequence out to ranks.
    #[error("sharding of {seq} tokens: {reason}")]
    Sharding {
        /// Length of the sequence.
        seq: usize,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A word of a config that means nothing here.
    #[error("{setting} has no \"{name}\"; there are {known}")]
    UnknownName {
        /// Which setting.
        setting: &'static str,
        /// The word that was given.
        name: String,
        /// The words that there are.
        known: &'static str,
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
