//! Who is in a group, and how its errors are worded.

use std::sync::Arc;

use crate::{BoxError, Error, Op};

/// The ranks of one group, as one of them sees it.
#[derive(Clone, Debug)]
pub struct Members {
    name: Arc<str>,
    ranks: Arc<[usize]>,
    index: usize,
}

impl Members {
    /// The group called `name` of these world ranks, in group order, seen by the member at `index`. `None` when
    /// `index` is not that of a member, or a rank appears twice.
    pub fn new(name: &str, ranks: &[usize], index: usize) -> Option<Self> {
        let twice = ranks.iter().enumerate().any(|(i, rank)| ranks[..i].contains(rank));
        (index < ranks.len() && !twice).then(|| Members { name: name.into(), ranks: ranks.into(), index })
    }

    /// The group's name: that of its view of the mesh.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The members' world ranks, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// This member's place in the group.
    pub fn index(&self) -> usize {
        self.index
    }

    /// This member's world rank.
    pub fn rank(&self) -> usize {
        self.ranks[self.index]
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// [`Error::Argument`] of this member.
    pub fn argument(&self, op: Op, reason: impl Into<String>) -> Error {
        Error::Argument { op, group: self.name.to_string(), rank: self.rank(), reason: reason.into() }
    }

    /// [`Error::Backend`] of this member.
    pub fn backend(&self, op: Op, source: impl Into<BoxError>) -> Error {
        Error::Backend { op, group: self.name.to_string(), rank: self.rank(), source: without_trace(source.into()) }
    }

    /// [`Error::Connect`] of this member.
    pub fn connect(&self, source: impl Into<BoxError>) -> Error {
        Error::Connect { group: self.name.to_string(), rank: self.rank(), source: without_trace(source.into()) }
    }
}

/// The error without the C++ stack that libtorch puts after its words.
fn without_trace(source: BoxError) -> BoxError {
    let told = source.to_string();
    match told.split_once("\nException raised from") {
        Some((words, _)) => words.into(),
        None => source,
    }
}
