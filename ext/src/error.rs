//! What can go wrong in this crate.

use std::time::Duration;

/// Any error, as a callback returns it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// libtorch refused the call or failed in it.
    #[error("{op}: {message}")]
    Torch {
        /// The call that failed.
        op: &'static str,
        /// What libtorch said.
        message: String,
    },
    /// Another rank did not do its part in time.
    #[error("{op} timed out after {after:?}: {message}")]
    Timeout {
        /// The call that waited.
        op: &'static str,
        /// How long it waited.
        after: Duration,
        /// What libtorch said.
        message: String,
    },
    /// A function or hook of the backward pass returned this error.
    #[error(transparent)]
    Callback {
        /// The error that it returned.
        source: BoxError,
    },
    /// A function or hook of the backward pass panicked.
    #[error("a callback of the autograd engine panicked: {message}")]
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// This build of libtorch, or this machine, lacks something.
    #[error("{what} is not available: {why}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// What is missing, and what to do about it.
        why: String,
    },
    /// An argument was refused before libtorch saw it.
    #[error("{op}: {message}")]
    Argument {
        /// The call that was refused.
        op: &'static str,
        /// What was wrong and what would be right.
        message: String,
    },
}

impl Error {
    /// Whether this is the error of a wait that took too long.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }

    pub(crate) fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Self::Argument { op, message: message.into() }
    }
}
