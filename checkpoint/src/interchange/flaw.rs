//! What is wrong with the bytes of a file, said by parsers that do not know which file it is.

use crate::Error;

/// What is wrong with bytes that should describe tensors.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// They do not hold together.
    Damaged(String),
    /// They need something that this reader has no part of.
    Unsupported { what: String, reason: String },
}

impl Flaw {
    pub(crate) fn damaged<T>(reason: impl Into<String>) -> Result<T, Flaw> {
        Err(Flaw::Damaged(reason.into()))
    }

    pub(crate) fn unsupported<T>(what: impl Into<String>, reason: impl Into<String>) -> Result<T, Flaw> {
        Err(Flaw::Unsupported { what: what.into(), reason: reason.into() })
    }

    /// For `map_err`: the error, said of a file.
    pub(crate) fn of(object: &str) -> impl FnOnce(Flaw) -> Error {
        move |flaw| match flaw {
            Flaw::Damaged(reason) => Error::Damaged { object: object.to_owned(), reason },
            Flaw::Unsupported { what, reason } => Error::Unsupported { what: format!("{what} in {object}"), reason },
        }
    }
}
