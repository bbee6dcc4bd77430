//! One collective of one rank, as plain data.

use serde::{Deserialize, Serialize};

/// What a rank's recorder knows of one collective. Times are nanoseconds on a clock of whoever holds the record.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CollectiveRecord {
    /// The how-manieth of its group it was, from 0; of a send or receive, the how-manieth from that rank to that rank.
    pub sequence: u64,
    /// The group's name, such as `tp`.
    pub group: String,
    /// The operation's name, such as `all-reduce`.
    pub op: String,
    /// The other rank of a send or receive.
    pub peer: Option<usize>,
    /// The shape of the tensor that this rank brought; of a receive, got.
    pub shape: Vec<i64>,
    /// Its element type.
    pub dtype: String,
    /// The call in words that are the same on all ranks exactly if the ranks agree.
    pub call: String,
    /// The bytes that this rank sends.
    pub bytes: u64,
    /// When this rank started it.
    pub issued: i64,
    /// When this rank began to wait for it.
    pub waited: Option<i64>,
    /// When this rank had its result.
    pub finished: Option<i64>,
    /// Whether it was let go without being waited for.
    pub dropped: bool,
    /// Whether it ended with an error.
    pub failed: bool,
}

impl CollectiveRecord {
    /// `all-reduce #182 on tp`, `recv #3 on pp from rank 1`.
    pub fn name(&self) -> String {
        let Self { op, sequence, group, .. } = self;
        match self.peer {
            None => format!("{op} #{sequence} on {group}"),
            Some(peer) if self.is_send() => format!("{op} #{sequence} on {group} to rank {peer}"),
            Some(peer) => format!("{op} #{sequence} on {group} from rank {peer}"),
        }
    }

    /// Of the two ends of a message, whether this is the sender's.
    pub fn is_send(&self) -> bool {
        self.op == "send"
    }
}
