//! Where a run stands in its data.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How many samples a run has consumed: all that a checkpoint needs to hold of the data.
///
/// It says nothing of ranks, accumulation or batch sizes, so any run goes on from it, at once and on any mesh. The step
/// from cursor `c` with a global batch size of `b` consumes the samples `c .. c + b`, and each data-parallel rank takes a
/// contiguous share; a rank that accumulates cuts its share into microbatches in order. So the samples of a step, and
/// even their order over ranks and microbatches, do not depend on how they are divided.
///
/// ```
/// use ferrotitan_data::Cursor;
///
/// let cursor = Cursor { samples: 100 };
/// assert_eq!(cursor.batch(8, 0, 2).unwrap(), 100..104);
/// assert_eq!(cursor.batch(8, 1, 2).unwrap(), 104..108);
/// assert_eq!(cursor.advance(8), Cursor { samples: 108 });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cursor {
    /// Global number of the next sample.
    pub samples: u64,
}

impl Cursor {
    /// The global numbers of the samples of one data-parallel rank in the next step.
    ///
    /// # Errors
    /// [`Error::Option`] where the batch does not divide among the ranks, or there is no such rank.
    pub fn batch(&self, global_batch_size: u64, rank: u64, ranks: u64) -> Result<Range<u64>> {
        if rank >= ranks {
            let reason = "a rank is below the number of data-parallel ranks";
            return Err(Error::Option { option: "rank", value: format!("{rank} of {ranks}"), reason });
        }
        if global_batch_size == 0 || !global_batch_size.is_multiple_of(ranks) {
            let value = format!("{global_batch_size} on {ranks} data-parallel ranks");
            let reason = "a global batch is a positive multiple of the data-parallel ranks";
            return Err(Error::Option { option: "global_batch_size", value, reason });
        }
        let share = global_batch_size / ranks;
        if self.samples.checked_add(global_batch_size).is_none() {
            let reason = "no run consumes 2^64 samples: the cursor is corrupt";
            return Err(Error::Option { option: "cursor", value: self.samples.to_string(), reason });
        }
        let start = self.samples + rank * share;
        Ok(start..start + share)
    }

    /// The cursor after a step.
    #[must_use]
    pub fn advance(self, global_batch_size: u64) -> Self {
        Self { samples: self.samples.saturating_add(global_batch_size) }
    }
}
