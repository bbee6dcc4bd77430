//! What an error of c10d means, found out with the help of the store: which rank is late, which has failed.
//!
//! c10d says that a connection broke or a wait took too long, and not whose fault it was. So a rank that fails leaves a
//! word in the store, and so does one whose wait takes too long: of the ranks that a collective waits for, those that
//! are silent are the ones that did not enter. A message waits for its other end alone.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::watch::{Watch, within};
use crate::{BoxError, Call, Error, Members};

/// How long to look for the word of another rank.
const PATIENCE: Duration = Duration::from_secs(1);

/// One rank of a group, asked what went wrong.
#[derive(Clone, Debug)]
pub(super) struct Witness {
    members: Members,
    watch: Arc<Watch>,
    timeout: Duration,
}

impl Witness {
    pub(super) fn new(members: Members, watch: Arc<Watch>, timeout: Duration) -> Self {
        Witness { members, watch, timeout }
    }

    pub(super) fn members(&self) -> &Members {
        &self.members
    }

    /// How long this rank waits for others.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Words an error that ended a call.
    pub(super) fn explain(&self, call: &Call, sequence: u64, error: BoxError) -> Error {
        let op = call.op();
        let (timed_out, lost) = match error.downcast_ref::<ferrotitan_ext::Error>() {
            Some(error) => (error.is_timeout(), is_loss(&error.to_string())),
            None => (false, false),
        };
        let late = timed_out.then(|| match call.peer() {
            Some(peer) => vec![self.members.ranks()[peer]],
            None => self.late(sequence),
        });
        // A failed rank leaves word before its connections break, but the word may be slower.
        let patience = if lost { PATIENCE.min(self.timeout) } else { Duration::ZERO };
        if let Some((rank, reason)) = self.watch.ask(patience) {
            return Error::PeerFailed { rank: Some(rank), reason };
        }
        match late {
            Some(waiting_for) => {
                let (group, rank) = (self.members.name().to_string(), self.members.rank());
                Error::Timeout { op, group, rank, waiting_for, after: self.timeout }
            }
            None if lost => {
                let mut others = self.members.ranks().iter().filter(|&&rank| rank != self.members.rank());
                let only = others.next().filter(|_| self.members.size() == 2).copied();
                Error::PeerFailed { rank: only, reason: self.members.backend(op, error).to_string() }
            }
            None => self.members.backend(op, error),
        }
    }

    /// Leaves word that this rank has waited too long, and gives the ranks that do not say the same; none where the store
    /// does not answer.
    fn late(&self, sequence: u64) -> Vec<usize> {
        let (store, members) = (self.watch.store().clone(), self.members.clone());
        let patience = PATIENCE.min(self.timeout);
        let silent = within(patience + PATIENCE, move || {
            let key = |rank: usize| format!("late/{}/{sequence}/{rank}", members.name());
            if store.set(&key(members.rank()), b"late").is_err() {
                return Vec::new();
            }
            // The others began to wait at another time, and may say so a little later.
            let end = Instant::now() + patience;
            loop {
                let ranks = members.ranks().iter().copied();
                let silent: Vec<_> = ranks.filter(|&rank| !store.check(&key(rank)).unwrap_or(true)).collect();
                if silent.is_empty() || Instant::now() >= end {
                    return silent;
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        silent.unwrap_or_default()
    }
}

/// Whether Gloo's or NCCL's words mean that a peer is gone.
fn is_loss(message: &str) -> bool {
    const WORDS: [&str; 7] = [
        "onnection closed",
        "onnection reset",
        "onnection refused",
        "roken pipe",
        "pair closure",
        "Socket closed",
        "remote process exited",
    ];
    WORDS.iter().any(|words| message.contains(words))
}
