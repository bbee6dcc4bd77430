//! `summary.json`: what a run came to, written once it has ended well.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

/// What a run came to, as its first rank sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Ranks of the mesh.
    pub ranks: usize,
    /// Seconds from the first step to the last, with validation.
    pub seconds: f64,
    /// Bytes of the device, at its peak; on a CPU, of the process, which is that of all ranks where they are threads.
    pub peak_memory: u64,
    /// Bytes of parameters, gradients and optimizer state, of the rank that holds most.
    pub state_bytes: u64,
    /// Bytes that this rank sent, by the group of ranks that they went through.
    pub bytes_sent: BTreeMap<String, u64>,
}

const FILE: &str = "summary.json";

impl Summary {
    /// Writes it into a folder, over that of an earlier run.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::write(folder.join(FILE), serde_json::to_vec_pretty(self)?)
    }

    /// Reads the one in a folder.
    ///
    /// # Errors
    /// When there is none, or it holds something else.
    pub fn read(folder: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(folder.join(FILE))?)?)
    }
}
