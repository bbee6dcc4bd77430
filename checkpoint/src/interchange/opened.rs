//! Checkpoints of any format.

use std::collections::BTreeMap;
use std::fmt;

use ferrotitan_mesh::Region;

use super::dcp::Folder;
use super::hugging_face::{self, Model};
use crate::{Checkpoint, Result, Source, Store, TensorInfo, Which};

/// A checkpoint whose format was found out.
#[derive(Debug)]
#[non_exhaustive]
pub enum Opened {
    /// One of this crate.
    Native(Box<Checkpoint>),
    /// A Llama in Hugging Face's format.
    HuggingFace(Box<Model>),
    /// A distributed checkpoint of PyTorch.
    Dcp(Box<Folder>),
}

/// One line of a table of what is in a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Row {
    /// The name of a tensor.
    pub name: String,
    /// Its shape and dtype.
    pub info: TensorInfo,
    /// Its bytes.
    pub bytes: u64,
    /// The parts that it was cut into.
    pub parts: usize,
    /// The files that hold them, each once.
    pub files: Vec<String>,
}

/// Opens what is in this folder: a `.metadata` makes it PyTorch's, a `config.json` Hugging Face's, and otherwise it is
/// one of steps, of which `which` names one.
///
/// # Errors
/// As [`Folder::open`], [`Model::open`] or [`Checkpoint::open`].
pub fn open(store: &Store, which: Which) -> Result<Opened> {
    if store.exists(super::dcp::METADATA)? {
        Folder::open(store.clone()).map(|folder| Opened::Dcp(Box::new(folder)))
    } else if store.exists(hugging_face::CONFIG)? {
        Model::open(store.clone()).map(|model| Opened::HuggingFace(Box::new(model)))
    } else {
        Checkpoint::open(store, which).map(|checkpoint| Opened::Native(Box::new(checkpoint)))
    }
}

impl Opened {
    /// A table of what is in it.
    pub fn inspect(&self) -> Vec<Row> {
        let row = |(name, info): (&String, &TensorInfo)| {
            let mut files: Vec<String> = match self {
                Opened::Native(checkpoint) => checkpoint.parts(name).iter().map(|part| part.file.clone()).collect(),
                Opened::HuggingFace(model) => model.file(name).map(str::to_owned).into_iter().collect(),
                Opened::Dcp(folder) => folder.files(name).map(str::to_owned).collect(),
            };
            let parts = files.len();
            files.sort_unstable();
            files.dedup();
            // A source knows no tensor that is larger than memory could be.
            let bytes = info.bytes().unwrap_or(usize::MAX) as u64;
            Row { name: name.clone(), info: info.clone(), bytes, parts, files }
        };
        self.tensors().iter().map(row).collect()
    }

    fn source(&self) -> &dyn Source {
        match self {
            Opened::Native(checkpoint) => checkpoint.as_ref(),
            Opened::HuggingFace(model) => model.as_ref(),
            Opened::Dcp(folder) => folder.as_ref(),
        }
    }
}

impl Source for Opened {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.source().tensors()
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        self.source().read(name, region, out)
    }
}

impl fmt::Display for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Opened::Native(_) => "Ferrotitan checkpoint",
            Opened::HuggingFace(_) => "Hugging Face model",
            Opened::Dcp(_) => "PyTorch distributed checkpoint",
        })
    }
}
