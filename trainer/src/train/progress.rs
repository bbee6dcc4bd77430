//! How far a run has come.

use ferrotitan_data::Cursor;
use serde::{Deserialize, Serialize};

/// How far a run has come: what a checkpoint holds beside tensors. It says nothing of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Steps taken.
    pub step: u64,
    /// Steps of the learning-rate schedule.
    pub schedule: u64,
    /// The place in the data.
    pub cursor: Cursor,
    /// Tokens of the steps taken, over all ranks.
    pub tokens: u64,
}
