//! How one split divides an axis among the ranks of a view.

use std::ops::Range;

use crate::region::even;
use crate::{Error, Result};

/// The parts that the ranks of a view get of an axis.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Parts {
    /// Balanced: sizes differ by at most 1, the larger parts first. Where there are more ranks than elements, the last
    /// parts are empty.
    Even,
    /// One range per rank of the view, in index order, in global coordinates of the axis. Ranks with the same range are
    /// replicas of each other. After an earlier split of the same axis, a rank keeps what lies in both.
    At(Vec<Range<usize>>),
}

impl Parts {
    /// Deals `n_groups` groups of `group_size` elements (attention heads, say) to `size` ranks, never splitting a group:
    /// as evenly as can be, or, where there are fewer groups than ranks, each group to equally many consecutive ranks.
    ///
    /// # Errors
    /// [`Error::Groups`] when there are fewer groups than ranks and the ranks are not a multiple of the groups.
    pub fn groups(n_groups: usize, group_size: usize, size: usize) -> Result<Self> {
        let group_range = |index| match n_groups {
            0 => None,
            _ if n_groups >= size => Some(even(0..n_groups, index, size)),
            _ if size.is_multiple_of(n_groups) => {
                let group = index / (size / n_groups);
                Some(group..group + 1)
            }
            _ => None,
        };
        let elements =
            |range: Range<usize>| Some(range.start.checked_mul(group_size)?..range.end.checked_mul(group_size)?);
        let ranges: Option<Vec<_>> = (0..size).map(|index| elements(group_range(index)?)).collect();
        ranges.map(Parts::At).ok_or(Error::Groups { groups: n_groups, size })
    }

    /// What the rank `index` of `count` keeps of `range`.
    pub(crate) fn keep(&self, range: Range<usize>, index: usize, count: usize) -> Range<usize> {
        match self {
            Parts::Even => even(range, index, count),
            Parts::At(ranges) => {
                let part = ranges.get(index).cloned().unwrap_or_default();
                let start = part.start.clamp(range.start, range.end);
                start..part.end.clamp(start, range.end)
            }
        }
    }

    /// How many ranks hold each part.
    pub(crate) fn replicas(&self) -> usize {
        match self {
            Parts::Even => 1,
            Parts::At(ranges) => match ranges.iter().find(|range| !range.is_empty()) {
                Some(first) => ranges.iter().filter(|range| *range == first).count(),
                None => 1,
            },
        }
    }

    /// Whether no rank before `index` has the same part.
    pub(crate) fn is_first(&self, index: usize) -> bool {
        match self {
            Parts::Even => true,
            Parts::At(ranges) => ranges.iter().position(|range| Some(range) == ranges.get(index)) == Some(index),
        }
    }

    /// Refuses ranges that do not partition an axis of `length` elements, apart from equally many replicas of each.
    pub(crate) fn validate(&self, length: usize) -> Result<()> {
        let Parts::At(given) = self else { return Ok(()) };
        let refuse = |problem: String| Err(Error::BadParts { ranges: format!("{given:?}"), length, problem });
        if let Some(range) = given.iter().find(|range| range.start > range.end || range.end > length) {
            return refuse(format!("{range:?} is not a range inside the axis"));
        }
        let mut ranges: Vec<_> = given.iter().filter(|range| !range.is_empty()).collect();
        ranges.sort_by_key(|range| (range.start, range.end));
        let mut covered = 0;
        for replicas in ranges.chunk_by(|a, b| a == b) {
            let range = replicas[0];
            if range.start < covered {
                return refuse(format!("{range:?} overlaps another range in part, so make the two equal or disjoint"));
            }
            if range.start > covered {
                return refuse(format!("nobody holds {covered}..{}", range.start));
            }
            if replicas.len() != self.replicas() {
                return refuse(format!("{range:?} has {} holders, so give every range equally many", replicas.len()));
            }
            covered = range.end;
        }
        if covered < length {
            return refuse(format!("nobody holds {covered}..{length}"));
        }
        Ok(())
    }
}
