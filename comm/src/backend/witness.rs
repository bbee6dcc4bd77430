//! What an error of c10d means, found out with the help of the store: which rank is late, which has failed.
//!
//! c10d says that a connection broke or a wait took too long, and not whose fault it was. So a rank that fails leaves a
//! word in the store, and so does one whose wait takes too long: of the ranks that a collective waits for, those that
//! are silent are the ones that did not enter.

use std::thread;
use std::time::{Duration, Instant};

use ferrotitan_ext::store::Store;

use crate::{BoxError, Error, Members, Op};

/// The key under which the first rank that fails says so.
const FAILED: &str = "failed";

/// How long to look for the word of another rank.
const PATIENCE: Duration = Duration::from_secs(1);

/// One rank of a group, asked what went wrong.
#[derive(Clone, Debug)]
pub(super) struct Witness {
    members: Members,
    /// Shared by all groups.
    store: Store,
    timeout: Duration,
}

/// Leaves word that `rank` has failed, unless another rank was first.
pub(super) fn announce(store: &Store, rank: usize, reason: &str) {
    if store.add("failures", 1).is_ok_and(|count| count == 1) {
        let told = store.set(FAILED, format!("{rank}\n{reason}").as_bytes());
        if let Err(error) = told {
            tracing::debug!("the other ranks could not be told of the failure: {error}");
        }
    }
}

/// Who has left word of a failure, and why it failed.
fn announced(store: &Store) -> Option<(usize, String)> {
    if !store.check(FAILED).ok()? {
        return None;
    }
    let word = String::from_utf8(store.get(FAILED).ok()?).ok()?;
    let (rank, reason) = word.split_once('\n')?;
    Some((rank.parse().ok()?, reason.to_owned()))
}

impl Witness {
    pub(super) fn new(members: Members, store: Store, timeout: Duration) -> Self {
        Witness { members, store, timeout }
    }

    pub(super) fn members(&self) -> &Members {
        &self.members
    }

    /// Words an error that ended a call.
    pub(super) fn explain(&self, op: Op, sequence: u64, error: BoxError) -> Error {
        let (timed_out, lost) = match error.downcast_ref::<ferrotitan_ext::Error>() {
            Some(error) => (error.is_timeout(), is_loss(&error.to_string())),
            None => (false, false),
        };
        if !timed_out && !lost {
            return self.members.backend(op, error);
        }
        // A failed rank leaves word before its connections break, but the word may be slower.
        let late = timed_out.then(|| self.late(op, sequence));
        if let Some((rank, reason)) = self.poll(|| announced(&self.store), timed_out) {
            return Error::PeerFailed { rank: Some(rank), reason };
        }
        match late {
            Some(waiting_for) => {
                let (group, rank) = (self.members.name().to_string(), self.members.rank());
                Error::Timeout { op, group, rank, waiting_for, after: self.timeout }
            }
            None => {
                let mut others = self.members.ranks().iter().filter(|&&rank| rank != self.members.rank());
                let only = others.next().filter(|_| self.members.size() == 2).copied();
                Error::PeerFailed { rank: only, reason: error.to_string() }
            }
        }
    }

    /// Leaves word that this rank has waited too long, and gives the ranks that do not say the same.
    fn late(&self, op: Op, sequence: u64) -> Vec<usize> {
        let class = if op.is_point_to_point() { "message" } else { "collective" };
        let key = |rank: usize| format!("late/{}/{class}/{sequence}/{rank}", self.members.name());
        if self.store.set(&key(self.members.rank()), b"late").is_err() {
            return Vec::new();
        }
        let silent = || -> Vec<usize> {
            let ranks = self.members.ranks().iter().copied();
            ranks.filter(|&rank| !self.store.check(&key(rank)).unwrap_or(true)).collect()
        };
        // The others began to wait at another time, and may say so a little later.
        self.poll(|| silent().is_empty().then(Vec::new), false).unwrap_or_else(silent)
    }

    /// Asks until there is an answer, or patience ends; `once` has none.
    fn poll<T>(&self, ask: impl Fn() -> Option<T>, once: bool) -> Option<T> {
        let end = Instant::now() + PATIENCE.min(self.timeout);
        loop {
            let answer = ask();
            if answer.is_some() || once || Instant::now() >= end {
                return answer;
            }
            thread::sleep(Duration::from_millis(20));
        }
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
