//! The one error type of this crate.

use std::time::Duration;

use ferrotitan_mesh::Region;

use crate::Dtype;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between a tensor and a store. Objects are named by their whole path or address.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An address of a store cannot be understood.
    #[error("{address} is neither a folder nor the address of a store: {reason}")]
    Address {
        /// As it was given.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The address needs a Cargo feature that this build lacks.
    #[error("{address} needs the feature `{feature}` of ferrotitan-checkpoint")]
    FeatureOff {
        /// As it was given.
        address: String,
        /// The feature to switch on.
        feature: &'static str,
    },
    /// There is no such object.
    #[error("{object} does not exist")]
    NotFound {
        /// Its path or address.
        object: String,
    },
    /// The store knows whoever asks too little.
    #[error("not allowed to {action} {object}: check the credentials in the environment and their rights: {reason}")]
    Denied {
        /// What was tried, as a verb.
        action: &'static str,
        /// The path or address.
        object: String,
        /// The store's words.
        reason: String,
    },
    /// The store refused or failed, also after retries.
    #[error("cannot {action} {object}: {reason}")]
    Store {
        /// What was tried, as a verb.
        action: &'static str,
        /// The path or address.
        object: String,
        /// The store's words.
        reason: String,
    },
    /// The store did not answer.
    #[error(
        "cannot {action} {object}: no answer within {} s; see whether the store works, or raise the timeout",
        after.as_secs_f64()
    )]
    TimedOut {
        /// What was tried, as a verb.
        action: &'static str,
        /// The path or address.
        object: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// An object is larger than what it can reasonably be.
    #[error("{object} has more than {limit} bytes, so it is hardly what it should be")]
    TooLarge {
        /// The path or address.
        object: String,
        /// How many were allowed.
        limit: u64,
    },
    /// An object's content is not what it should be.
    #[error("{object} is damaged: {reason}")]
    Damaged {
        /// The path or address.
        object: String,
        /// What does not hold.
        reason: String,
    },
    /// The bytes of a tensor are not those that were written.
    #[error(
        "tensor {tensor} is damaged: bytes {start} to {end} of {object} have another checksum than when they were written"
    )]
    Checksum {
        /// The tensor's name.
        tensor: String,
        /// The file.
        object: String,
        /// The first byte of the part that was checked.
        start: u64,
        /// The byte after its last.
        end: u64,
    },
    /// A tensor could not be read.
    #[error("tensor {tensor}: {source}")]
    Tensor {
        /// Its name.
        tensor: String,
        /// Why.
        source: Box<Error>,
    },
    /// There is no step.
    #[error("{address} has no {which}; {found}")]
    NoStep {
        /// The folder of the checkpoints.
        address: String,
        /// What was looked for.
        which: String,
        /// Which steps there are, in words.
        found: String,
    },
    /// The step that is to be saved is there already.
    #[error("step {step} exists already in {address}; delete its folder, or save to another one")]
    StepExists {
        /// The step.
        step: u64,
        /// The folder of the checkpoints.
        address: String,
    },
    /// A source has no tensor of a name.
    #[error("there is no tensor {tensor}")]
    NoTensor {
        /// The name.
        tensor: String,
    },
    /// A checkpoint lacks tensors that were asked for.
    #[error("the checkpoint lacks {} tensors that the model has: {}", names.len(), some(names))]
    Lacking {
        /// Their names.
        names: Vec<String>,
    },
    /// A checkpoint has tensors that no rank asks for.
    #[error("the checkpoint has {} tensors that the model lacks: {}", names.len(), some(names))]
    Unasked {
        /// Their names.
        names: Vec<String>,
    },
    /// A tensor has another shape than the one that it is to be loaded into.
    #[error("tensor {tensor} has shape {found:?} in the checkpoint, but {needed:?} in the model")]
    Shape {
        /// Its name.
        tensor: String,
        /// The global shape in the checkpoint.
        found: Vec<usize>,
        /// The global shape of the item.
        needed: Vec<usize>,
    },
    /// A tensor has another dtype than the one that it is to be loaded into.
    #[error("tensor {tensor} is {found} in the checkpoint, but {needed} in the model; allow casts to load it")]
    Dtype {
        /// Its name.
        tensor: String,
        /// In the checkpoint.
        found: Dtype,
        /// Of the item.
        needed: Dtype,
    },
    /// A region is no part of its tensor, or its buffer has another length.
    #[error("tensor {tensor} of shape {shape:?} has no region {region:?} of {bytes} bytes")]
    Region {
        /// The tensor's name.
        tensor: String,
        /// What was asked for.
        region: Region,
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The bytes of the buffer.
        bytes: usize,
    },
    /// An item of a save or a load cannot be.
    #[error("tensor {tensor}: {reason}")]
    Item {
        /// Its name.
        tensor: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// Something that no checkpoint can hold, or that this build cannot read.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// What.
        what: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A save did not come to its end. The steps before it are as they were.
    #[error("step {step} is not saved: {source}")]
    NotSaved {
        /// The step.
        step: u64,
        /// Why.
        source: Box<Error>,
    },
    /// Ranks did not finish their part of a save.
    #[error(
        "after {} s, nothing is there of rank {}; see what became of them, or raise the patience",
        after.as_secs_f64(), ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
    )]
    Absent {
        /// Who is missing.
        ranks: Vec<usize>,
        /// How long they were waited for.
        after: Duration,
    },
    /// Another rank failed in its part of a save or a load.
    #[error("rank {rank} failed: {reason}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its words.
        reason: String,
    },
    /// The parts that the ranks gave do not make up a tensor.
    #[error("tensor {tensor}: {reason}; every rank gives each tensor that it holds, with the layout that it has")]
    Coverage {
        /// Its name.
        tensor: String,
        /// What does not fit.
        reason: String,
    },
    /// A save was given up, since whoever wanted it is gone.
    #[error("it was given up")]
    GivenUp,
    /// A thread of this crate could not start, or ended without a result.
    #[error("the {thread} thread: {reason}")]
    Thread {
        /// Which.
        thread: &'static str,
        /// Why.
        reason: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] ferrotitan_comm::Error),
    /// A mesh or a layout cannot be.
    #[error(transparent)]
    Mesh(#[from] ferrotitan_mesh::Error),
    /// libtorch refused.
    #[error(transparent)]
    Torch(#[from] ferrotitan_ext::Error),
}

/// The first few names of a list.
fn some(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{shown}, …") } else { shown }
}

impl Error {
    /// For `map_err`: the same error, said of a tensor.
    pub(crate) fn of_tensor(tensor: &str) -> impl FnOnce(Error) -> Error {
        move |error| match error {
            Error::Checksum { .. } | Error::Tensor { .. } => error,
            other => Error::Tensor { tensor: tensor.to_owned(), source: Box::new(other) },
        }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Error::Torch(ferrotitan_ext::Error::Torch { op: "checkpoint", message: error.to_string() })
    }
}
