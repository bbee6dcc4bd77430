//! What can go wrong in a collective.

use std::time::Duration;

use crate::Op;

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error that may cross threads.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a collective, a connection, or a run of ranks failed. Every rank in here is a world rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller gave something that this collective cannot take; nothing was sent.
    #[error("{op} in group {group} on rank {rank}: {reason}")]
    Argument {
        /// Which collective.
        op: Op,
        /// The group's name.
        group: String,
        /// The rank that called.
        rank: usize,
        /// What was wrong and what would be right.
        reason: String,
    },
    /// Other ranks did not come in time.
    #[error(
        "{op} in group {group} on rank {rank}: gave up after {} s waiting for {}; see where they are, or raise the timeout",
        after.as_secs_f64(), named(waiting_for)
    )]
    Timeout {
        /// Which collective.
        op: Op,
        /// The group's name.
        group: String,
        /// The rank that waited.
        rank: usize,
        /// The ranks that had not entered; empty when the backend cannot tell.
        waiting_for: Vec<usize>,
        /// How long it waited.
        after: Duration,
    },
    /// Two ranks called different things at the same place of a group's sequence.
    #[error(
        "group {group}, number {sequence}: rank {rank} called {called}, but rank {other} called {other_called}; every \
         rank must call the same collectives in the same order"
    )]
    Mismatch {
        /// The group's name.
        group: String,
        /// The how-manieth collective of the group (or message of the pair) it is, from 0.
        sequence: u64,
        /// The rank that was found to differ.
        rank: usize,
        /// What it called.
        called: String,
        /// The rank that it differs from.
        other: usize,
        /// What that one called.
        other_called: String,
    },
    /// Another rank failed, so this one waits for nothing.
    #[error("{} failed: {reason}", named(rank.as_slice()))]
    PeerFailed {
        /// The rank that failed first; absent when it left without a word and the backend cannot tell which it was.
        rank: Option<usize>,
        /// Why.
        reason: String,
    },
    /// The backend, or libtorch, refused.
    #[error("{op} in group {group} on rank {rank}: {source}")]
    Backend {
        /// Which collective.
        op: Op,
        /// The group's name.
        group: String,
        /// The rank that called.
        rank: usize,
        /// Its own words.
        source: BoxError,
    },
    /// A group could not be connected.
    #[error("rank {rank} could not connect to group {group}: {source}")]
    Connect {
        /// The group's name.
        group: String,
        /// The rank that tried.
        rank: usize,
        /// The backend's own words.
        source: BoxError,
    },
    /// The environment does not describe a rank of a world.
    #[error("the environment does not say which rank this is: {}; start with torchrun or set the variables", problems.join("; "))]
    Environment {
        /// Everything that is wrong with it.
        problems: Vec<String>,
    },
    /// A mesh that cannot be.
    #[error(transparent)]
    Mesh(#[from] ferrotitan_mesh::Error),
    /// A rank's own work failed: the root cause of a run's end.
    #[error("rank {rank}: {source}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its error.
        source: BoxError,
    },
    /// A rank panicked: the root cause of a run's end.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// The rank.
        rank: usize,
        /// What it said.
        message: String,
    },
}

/// `rank 3`, `ranks 1, 2`, or that nobody knows.
fn named(ranks: &[usize]) -> String {
    match ranks {
        [] => "another rank".to_owned(),
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {}", ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_names_who_is_missing() {
        let error = |waiting_for| Error::Timeout {
            op: Op::AllGather,
            group: "tp".into(),
            rank: 2,
            waiting_for,
            after: Duration::from_millis(1500),
        };
        let told = error(vec![1, 3]).to_string();
        assert!(
            told.starts_with("all-gather in group tp on rank 2: gave up after 1.5 s waiting for ranks 1, 3"),
            "{told}"
        );
        assert!(error(vec![7]).to_string().contains("waiting for rank 7;"));
        assert!(error(vec![]).to_string().contains("waiting for another rank;"));
    }
}
