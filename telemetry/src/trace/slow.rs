//! Which rank the others wait for.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Place;

/// How long a rank stood still.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Waits {
    /// Which rank.
    pub place: Place,
    /// By the group's name.
    pub by_group: BTreeMap<String, Duration>,
}

/// The rank that arrives last, and how that shows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlowRank {
    /// Which rank.
    pub place: Place,
    /// One a dimension of more than one rank, outermost first.
    pub path: Vec<Turn>,
}

/// One dimension of the walk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    /// The dimension.
    pub dimension: String,
    /// The place along it whose ranks wait the least in the groups of that dimension.
    pub index: usize,
    /// How long those wait, on average.
    pub waits: Duration,
    /// How long the others do.
    pub others: Duration,
}

/// Walks over the dimensions from the outermost to the innermost. In each, the ranks that wait the least are those that
/// the others wait for, and the walk goes on among them. `None` where there are fewer than two ranks, or none waited.
///
/// The walk is that of the report on Llama 3's training (Grattafiori et al. 2024, section 3.3.4): who arrives last at a
/// collective waits the shortest for it.
pub fn slow_rank(ranks: &[Waits]) -> Option<SlowRank> {
    let first = ranks.first().filter(|_| ranks.len() > 1)?;
    if ranks.iter().all(|rank| rank.by_group.values().all(Duration::is_zero)) {
        return None;
    }
    let mut suspects: Vec<&Waits> = ranks.iter().collect();
    let mut path = Vec::new();
    for along in &first.place.coordinates {
        let dimension = along.dimension.as_str();
        // By index: the sum of waits, and of how many ranks.
        let mut sums: BTreeMap<usize, (Duration, u32)> = BTreeMap::new();
        for rank in &suspects {
            let (sum, count) = sums.entry(rank.place.index(dimension)).or_default();
            *sum = sum.saturating_add(waited(rank, dimension));
            *count += 1;
        }
        let mean = |(sum, count): (Duration, u32)| sum / count.max(1);
        let (&index, &least) = sums.iter().min_by_key(|(_, sum)| mean(**sum))?;
        let rest = sums.iter().filter(|(other, _)| **other != index);
        let rest = rest.fold((Duration::ZERO, 0), |(a, m), (_, &(b, n))| (a.saturating_add(b), m + n));
        path.push(Turn { dimension: along.dimension.clone(), index, waits: mean(least), others: mean(rest) });
        suspects.retain(|rank| rank.place.index(dimension) == index);
    }
    Some(SlowRank { place: suspects.first()?.place.clone(), path })
}

/// How long a rank stood still in groups whose members differ along the dimension.
fn waited(rank: &Waits, dimension: &str) -> Duration {
    let own = rank.place.index(dimension);
    let spans = |group: &str| {
        let mut members = rank.place.groups.get(group).into_iter().flatten();
        members.any(|&member| rank.place.index_of(member, dimension).is_some_and(|index| index != own))
    };
    let waits = rank.by_group.iter().filter(|(group, _)| spans(group)).map(|(_, waited)| *waited);
    waits.fold(Duration::ZERO, Duration::saturating_add)
}
