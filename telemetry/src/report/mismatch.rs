//! Ranks that called different things at the same place of a group's sequence.

use std::collections::BTreeMap;

use super::Evidence;
use super::words::{ranks, verb};
use crate::CollectiveRecord;

/// The first disagreement of one group.
#[derive(Debug)]
pub(super) struct Mismatch {
    /// The ranks that differ from most others; all of them when nobody is in the majority.
    pub(super) suspects: Vec<usize>,
    /// What the others called.
    pub(super) op: String,
    pub(super) sequence: u64,
    pub(super) group: String,
    /// All that called it.
    pub(super) members: Vec<usize>,
    /// When the first of them did.
    pub(super) when: i64,
    /// What differs, in words without the suspects' names.
    pub(super) says: String,
}

/// The calls of one place of a sequence.
type Calls<'a> = Vec<(usize, &'a CollectiveRecord)>;

/// The first disagreement of each group, the earliest first.
pub(super) fn find(evidence: &Evidence) -> Vec<Mismatch> {
    // By group name and sequence, then by the members of the group.
    let mut places: BTreeMap<(&str, u64), BTreeMap<&[usize], Calls>> = BTreeMap::new();
    // By group name, sender, receiver and number.
    let mut messages: BTreeMap<(&str, usize, usize, u64), Calls> = BTreeMap::new();
    for (&rank, dump) in &evidence.dumps {
        for record in &dump.collectives {
            let (group, sequence) = (record.group.as_str(), record.sequence);
            if let Some(peer) = record.peer {
                let (from, to) = if record.is_send() { (rank, peer) } else { (peer, rank) };
                messages.entry((group, from, to, sequence)).or_default().push((rank, record));
            } else if let Some(members) = dump.place.groups.get(group) {
                places.entry((group, sequence)).or_default().entry(members).or_default().push((rank, record));
            }
        }
    }
    let mut found: BTreeMap<(&str, &[usize]), Mismatch> = BTreeMap::new();
    for (&(group, _), teams) in &places {
        for (&members, calls) in teams {
            let first = !found.contains_key(&(group, members));
            if let Some(mismatch) = first.then(|| of_collective(calls, teams)).flatten() {
                found.insert((group, members), mismatch);
            }
        }
    }
    let mut found: Vec<Mismatch> = found.into_values().collect();
    found.extend(messages.values().filter_map(of_message));
    found.sort_by_key(|mismatch| mismatch.when);
    found
}

fn of_collective(calls: &Calls, teams: &BTreeMap<&[usize], Calls>) -> Option<Mismatch> {
    let mut parties: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (rank, record) in calls {
        parties.entry(&record.call).or_default().push(*rank);
    }
    if parties.len() < 2 {
        return None;
    }
    // Groups of one name run one program: where this one is divided evenly, the others decide.
    let votes = |call: &str| teams.values().flatten().filter(|(_, record)| record.call == call).count();
    let weight = |call: &str, party: &[usize]| (party.len(), votes(call));
    let most = parties.iter().map(|(call, party)| weight(call, party)).max()?;
    let mut leaders = parties.iter().filter(|(call, party)| weight(call, party) == most);
    let (leader, tied) = (*leaders.next()?.0, leaders.next().is_some());
    let said = |call: &str| calls.iter().find(|(_, record)| record.call == call).map(|(_, record)| *record);
    let usual = said(leader)?;
    let mut suspects: Vec<usize> =
        parties.iter().filter(|(call, _)| tied || **call != leader).flat_map(|(_, party)| party.clone()).collect();
    suspects.sort_unstable();
    let other = parties.keys().find(|call| **call != leader).and_then(|call| said(call))?;
    let told = parties.iter().map(|(call, party)| format!("{} called {call}", ranks(party)));
    let what = difference(usual, other);
    let hint = match usual.op == other.op {
        true => "",
        false => "; one of them left a collective out, or called one too many",
    };
    let says = format!(
        "{} with {what} as #{} on {}: {}{hint}",
        verb(&suspects, "come"),
        usual.sequence,
        usual.group,
        told.collect::<Vec<_>>().join(", "),
    );
    Some(mismatch(suspects, usual, calls, says))
}

fn of_message(calls: &Calls) -> Option<Mismatch> {
    let [(first, one), (second, other)] = calls.as_slice() else { return None };
    if (&one.shape, &one.dtype) == (&other.shape, &other.dtype) {
        return None;
    }
    let what = difference(one, other);
    let ends = [(first, one), (second, other)]
        .map(|(rank, record)| format!("rank {rank} called {} of {} {:?}", record.name(), record.dtype, record.shape));
    let says = format!("disagree by {what}: {}", ends.join(", "));
    let mut suspects = vec![*first, *second];
    suspects.sort_unstable();
    Some(mismatch(suspects, one, calls, says))
}

fn mismatch(suspects: Vec<usize>, usual: &CollectiveRecord, calls: &Calls, says: String) -> Mismatch {
    Mismatch {
        suspects,
        op: usual.op.clone(),
        sequence: usual.sequence,
        group: usual.group.clone(),
        members: calls.iter().map(|(rank, _)| *rank).collect(),
        when: calls.iter().map(|(_, record)| record.issued).min().unwrap_or(0),
        says,
    }
}

fn difference(one: &CollectiveRecord, other: &CollectiveRecord) -> &'static str {
    match () {
        () if one.op != other.op && one.peer.is_none() => "another operation",
        () if one.dtype != other.dtype => "another dtype",
        () if one.shape != other.shape => "another shape",
        () => "other parameters",
    }
}
