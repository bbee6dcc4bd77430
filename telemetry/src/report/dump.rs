//! What a rank leaves behind, and how the ranks of a machine ended.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::folder::{ENDS, File, write};
use crate::{CollectiveRecord, Place, Result};

/// What a rank is at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// Building the model and connecting.
    #[default]
    Start,
    /// Waiting for the data loader.
    Data,
    /// A forward pass.
    Forward,
    /// A backward pass.
    Backward,
    /// Forward and backward passes, where a pipeline's schedule mixes them.
    Passes,
    /// Clipping and the update of the parameters.
    Optimizer,
    /// Writing or reading a checkpoint.
    Checkpoint,
    /// Validation.
    Validation,
    /// Telling of the step.
    Metrics,
}

/// As in `it is in the data loader`.
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Start => "at the start",
            Phase::Data => "in the data loader",
            Phase::Forward => "in the forward pass",
            Phase::Backward => "in the backward pass",
            Phase::Passes => "in the passes of the pipeline",
            Phase::Optimizer => "in the optimizer",
            Phase::Checkpoint => "in the checkpoint",
            Phase::Validation => "in the validation",
            Phase::Metrics => "telling of the step",
        })
    }
}

/// Why a rank wrote its dump.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Its own work failed.
    Failed,
    /// A collective of its own failed, for none of the reasons below.
    CollectiveFailed,
    /// It waited for others for too long.
    TimedOut,
    /// It called something else than another rank.
    Mismatched,
    /// A collective of its own failed because another rank has.
    PeerFailed,
    /// It was told that another rank has failed, or to end, while it was at something.
    Told,
}

/// What one rank was at.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Dump {
    /// Which rank.
    pub place: Place,
    /// Why it wrote this.
    pub reason: Reason,
    /// Its error, if it had one.
    pub error: Option<String>,
    /// When it wrote this, in nanoseconds since 1970, as all times in here.
    pub written: i64,
    /// What it was at.
    pub phase: Phase,
    /// Since when.
    pub phase_since: i64,
    /// The step that it was at; 0 before the first.
    pub step: u64,
    /// How many collectives it has started in each group, by the group's name. Sends and receives do not count.
    pub entered: BTreeMap<String, u64>,
    /// Its last collectives, oldest first.
    pub collectives: Vec<CollectiveRecord>,
}

impl Dump {
    /// Writes it to a file, as a whole or not at all.
    ///
    /// # Errors
    /// [`crate::Error::Write`].
    pub fn write(&self, path: &Path) -> Result<()> {
        write(path, &File::Dump(Box::new(self.clone())))
    }
}

/// How a rank's process ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct End {
    /// `exited with code 1`, `was killed by SIGKILL`.
    pub how: String,
    /// Whether it ended well.
    pub well: bool,
    /// Whether a signal ended it, and not the process itself.
    pub by_signal: bool,
    /// Whether it had been told to end.
    pub told: bool,
}

/// How the ranks of one machine ended, by rank.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Ends {
    /// How many ranks there were on all machines.
    pub world_size: usize,
    /// Those of this machine.
    pub ranks: BTreeMap<usize, End>,
}

impl Ends {
    /// Writes it to a file of its own in the folder of the dumps.
    ///
    /// # Errors
    /// [`crate::Error::Write`].
    pub fn write(&self, folder: &Path) -> Result<PathBuf> {
        let first = self.ranks.keys().next().copied().unwrap_or(0);
        let path = folder.join(format!("{ENDS}{first}.json"));
        write(&path, &File::Ends(self.clone()))?;
        Ok(path)
    }
}
