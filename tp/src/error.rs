//! What can be wrong with a plan, or with a model for it.

use crate::Style;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A pattern of a plan is no glob.
    #[error("the plan's pattern {pattern:?} cannot be read: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A pattern of a plan decides nothing, so that what it was written for would silently go another way.
    #[error(
        "the plan's pattern {pattern:?} decides no parameter: correct it, remove it, or move it up; there are {known}"
    )]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// Some of the parameters' names.
        known: String,
    },
    /// A plan says nothing of a parameter.
    #[error(
        "the plan says nothing of parameter {name}: add a pattern for it, with the style Replicated if each rank applies it to its own tokens"
    )]
    Unplanned {
        /// The parameter's full name.
        name: String,
    },
    /// A parameter stands where its style means nothing.
    #[error("parameter {name} has the style {style:?}, but stands {place}: {remedy}")]
    Misplaced {
        /// The parameter's full name.
        name: String,
        /// Its style.
        style: Style,
        /// Where it stands.
        place: &'static str,
        /// What would be right.
        remedy: &'static str,
    },
    /// Projections of one input that cannot be computed together.
    #[error(
        "parameters {first} and {second} project one input, but have the styles {first_style:?} and {second_style:?}: give both the same"
    )]
    MixedStyles {
        /// The full name of the first projection's weight.
        first: String,
        /// Its style.
        first_style: Style,
        /// The full name of another projection's weight.
        second: String,
        /// Its style.
        second_style: Style,
    },
    /// Attention heads that cannot be dealt out without splitting one.
    #[error("parameter {name}: {problem}")]
    Heads {
        /// The parameter's full name.
        name: String,
        /// What does not fit and what would.
        problem: String,
    },
    /// A layout could not be made.
    #[error("parameter {name}: {source}")]
    Layout {
        /// The parameter's full name.
        name: String,
        /// What `mesh` found wrong.
        source: ferrotitan_mesh::Error,
    },
    /// A group could not be had.
    #[error(transparent)]
    Comm(#[from] ferrotitan_comm::Error),
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Carries a collective's error out of a module.
pub(crate) fn carried(context: &'static str) -> impl Fn(ferrotitan_comm::Error) -> ferrotitan_nn::Error {
    move |source| ferrotitan_nn::Error::Other { context: context.into(), source: source.into() }
}

/// Names the module that an operation of libtorch failed in.
pub(crate) trait Context<T> {
    fn context(self, context: &'static str) -> ferrotitan_nn::Result<T>;
}

impl<T> Context<T> for std::result::Result<T, tch::TchError> {
    fn context(self, context: &'static str) -> ferrotitan_nn::Result<T> {
        self.map_err(|source| ferrotitan_nn::Error::Torch { context, source })
    }
}
