//! What can go wrong in a module.

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused an operation.
    #[error("{context}: {source}")]
    Torch {
        /// The module and the step of it.
        context: &'static str,
        /// libtorch's own words.
        source: tch::TchError,
    },
    /// libtorch refused an operation of the shim.
    #[error(transparent)]
    Ext(#[from] ferrotitan_ext::Error),
    /// A parameter was read before it had storage.
    #[error("parameter {name} has no storage yet; materialize the model before its first forward pass")]
    NotMaterialized {
        /// The parameter's full name.
        name: String,
    },
    /// A layout could not be made.
    #[error("parameter {name}: {source}")]
    Layout {
        /// The parameter's full name.
        name: String,
        /// What `mesh` found wrong.
        source: ferrotitan_mesh::Error,
    },
    /// An input has the wrong shape.
    #[error("{module}: got {got}, expected {expected}")]
    Shape {
        /// Which module was called.
        module: &'static str,
        /// What it was given.
        got: String,
        /// What it takes.
        expected: String,
    },
    /// A model's configuration contradicts itself.
    #[error("{0}")]
    Config(String),
    /// A layer that is checkpointed by operation ran otherwise in the backward pass than in the forward pass.
    #[error(
        "a checkpointed layer had {first} in the forward pass where it has {second} in the backward pass; what a layer runs \
         may depend on its input and its batch alone"
    )]
    Recomputation {
        /// What the forward pass ran.
        first: String,
        /// What the backward pass runs there.
        second: String,
    },
    /// A seam's replacement, or a wrapped layer, failed.
    #[error("{context}: {source}")]
    Other {
        /// What was running.
        context: String,
        /// Its error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names the module that an operation of libtorch failed in.
pub(crate) trait Context<T> {
    fn context(self, context: &'static str) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, tch::TchError> {
    fn context(self, context: &'static str) -> Result<T> {
        self.map_err(|source| Error::Torch { context, source })
    }
}
