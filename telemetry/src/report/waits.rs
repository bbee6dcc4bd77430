//! Who waits for whom.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::words::{between, ranks, seconds};
use super::{Dump, Evidence};
use crate::CollectiveRecord;

/// One rank's standing still in one collective.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Wait {
    /// The rank that waits.
    pub rank: usize,
    /// In what: `all-reduce #182 on tp`.
    pub what: String,
    /// The operation's name.
    pub op: String,
    /// Its number in its group.
    pub sequence: u64,
    /// The group's name.
    pub group: String,
    /// The ranks that have not entered it; none when all have, and it has not ended all the same.
    pub missing: Vec<usize>,
    /// Since when, in nanoseconds since 1970.
    pub since: i64,
    /// How long it had waited when it wrote its dump.
    pub seconds: f64,
}

impl Wait {
    /// Whether it is between two ranks.
    pub(super) fn is_message(&self) -> bool {
        matches!(self.op.as_str(), "send" | "recv")
    }

    /// `rank 2 waits for rank 3 in all-reduce #182 on tp since 30 s`.
    pub(super) fn says(&self) -> String {
        let (rank, what, since) = (self.rank, &self.what, seconds(self.seconds));
        match self.missing.is_empty() {
            false => format!("rank {rank} waits for {} in {what} since {since}", ranks(&self.missing)),
            true => format!("rank {rank} is in {what}, which all have entered, since {since}"),
        }
    }
}

/// Every wait that had not ended.
pub(super) fn find(evidence: &Evidence) -> Vec<Wait> {
    let waits = |dump| unfinished(dump).map(move |record| wait(evidence, dump, record));
    evidence.dumps.values().flat_map(waits).collect()
}

/// What a rank stood still in: what it had begun to wait for, or what failed before it could.
fn unfinished(dump: &Dump) -> impl Iterator<Item = &CollectiveRecord> {
    let open = |record: &&CollectiveRecord| {
        (record.waited.is_some() || record.failed) && record.finished.is_none() && !record.dropped
    };
    dump.collectives.iter().filter(open)
}

fn wait(evidence: &Evidence, dump: &Dump, record: &CollectiveRecord) -> Wait {
    let (rank, since) = (dump.place.rank, record.waited.unwrap_or(record.issued));
    let missing = match record.peer {
        Some(peer) => evidence.dumps.get(&peer).is_none_or(|theirs| !meets(theirs, rank, record)).then_some(peer),
        None => None,
    };
    Wait {
        rank,
        what: record.name(),
        op: record.op.clone(),
        sequence: record.sequence,
        group: record.group.clone(),
        missing: match record.peer {
            Some(_) => missing.into_iter().collect(),
            None => absent(evidence, dump, record),
        },
        since,
        seconds: between(since, dump.written),
    }
}

/// Whether the other end of a message has done its part.
fn meets(theirs: &Dump, rank: usize, record: &CollectiveRecord) -> bool {
    theirs.collectives.iter().any(|other| {
        let pair = other.peer == Some(rank) && other.is_send() != record.is_send();
        pair && other.group == record.group && other.sequence >= record.sequence
    })
}

/// The members of a collective that have not entered it. A member without a dump is one, unless it ended well and
/// another is missing for certain.
fn absent(evidence: &Evidence, dump: &Dump, record: &CollectiveRecord) -> Vec<usize> {
    let members = dump.place.groups.get(&record.group).map_or(&[][..], Vec::as_slice);
    let others = members.iter().copied().filter(|&member| member != dump.place.rank);
    let (mut certain, mut silent, mut ended) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for member in others {
        match evidence.dumps.get(&member) {
            Some(theirs) if theirs.entered.get(&record.group).copied().unwrap_or(0) > record.sequence => {}
            Some(_) => drop(certain.insert(member)),
            None if evidence.ends.ranks.get(&member).is_some_and(|end| end.well) => drop(ended.insert(member)),
            None => drop(silent.insert(member)),
        }
    }
    certain.append(&mut silent);
    if certain.is_empty() { ended.into_iter().collect() } else { certain.into_iter().collect() }
}

/// Who waits for whom, as a graph.
#[derive(Debug, Default)]
pub(super) struct Graph {
    waits_for: BTreeMap<usize, BTreeSet<usize>>,
    waited_by: BTreeMap<usize, BTreeSet<usize>>,
}

impl Graph {
    pub(super) fn new(waits: &[Wait]) -> Self {
        let mut graph = Graph::default();
        for wait in waits {
            for &other in &wait.missing {
                graph.waits_for.entry(wait.rank).or_default().insert(other);
                graph.waited_by.entry(other).or_default().insert(wait.rank);
            }
        }
        graph
    }

    /// Ranks that others wait for, and that wait for nobody.
    pub(super) fn roots(&self) -> BTreeSet<usize> {
        self.waited_by.keys().copied().filter(|rank| !self.waits_for.contains_key(rank)).collect()
    }

    /// All ranks that wait for this one, whether for it or for others that do.
    pub(super) fn behind(&self, rank: usize) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut open = vec![rank];
        while let Some(next) = open.pop() {
            for &waiting in self.waited_by.get(&next).into_iter().flatten() {
                if waiting != rank && found.insert(waiting) {
                    open.push(waiting);
                }
            }
        }
        found
    }

    /// Ranks that wait for others and, through them, for nobody but each other.
    pub(super) fn circles(&self) -> BTreeSet<usize> {
        let free: BTreeSet<usize> = self.roots().into_iter().flat_map(|root| self.behind(root)).collect();
        self.waits_for.keys().copied().filter(|rank| !free.contains(rank)).collect()
    }
}
