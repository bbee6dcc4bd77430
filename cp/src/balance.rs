//! How the tokens of a sequence are dealt out so that every rank has equally much to do.

use std::str::FromStr;

use crate::sharding::chunks;
use crate::{Error, Mask, Result, Sharding};

/// How a sequence is dealt out to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Balance {
    /// [`Sharding::head_tail`]: equal work under a causal mask over the whole sequence.
    #[default]
    HeadTail,
    /// [`Sharding::contiguous`]: under a causal mask, the last rank has nearly twice the mean to do.
    Contiguous,
    /// By the work that the mask of the batch at hand gives each token: the sequence is cut into chunks, as few as will
    /// do, of which every rank gets equally many (so that the work outside attention stays equal) and about equal work.
    Documents,
}

impl Balance {
    /// Deals out the `seq` tokens of a batch of `batch` sequences, all alike. The same on every rank that asks.
    ///
    /// # Errors
    /// Without ranks, or when the mask is of another batch.
    pub fn sharding(self, mask: &Mask, batch: usize, seq: usize, ranks: usize) -> Result<Sharding> {
        match self {
            Balance::HeadTail => Sharding::head_tail(seq, ranks),
            Balance::Contiguous => Sharding::contiguous(seq, ranks),
            Balance::Documents => by_documents(mask, batch, seq, ranks),
        }
    }
}

/// The names of TorchTitan's `context_parallel_load_balancer` ("headtail", "ptrr": chunks by their processing time), and
/// "contiguous" and "documents".
impl FromStr for Balance {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "headtail" => Ok(Balance::HeadTail),
            "contiguous" => Ok(Balance::Contiguous),
            "documents" | "ptrr" => Ok(Balance::Documents),
            _ => Err(Error::UnknownName {
                setting: "context_parallel_load_balancer",
                name: name.to_owned(),
                known: "\"headtail\", \"contiguous\", \"documents\" (\"ptrr\")",
            }),
        }
    }
}

/// A dealing is good enough when the most loaded rank has at most this much more to do than the mean: more chunks would
/// cost more, in calls of the kernel, than they would even out.
const GOOD_ENOUGH: f64 = 1.03;

/// At most so many chunks a rank.
const MOST_CHUNKS: usize = 64;

fn by_documents(mask: &Mask, batch: usize, seq: usize, ranks: usize) -> Result<Sharding> {
    let work = work_before(mask, batch, seq)?;
    let mut best = None;
    let mut chunks_a_rank = 2;
    while ranks > 0 && chunks_a_rank <= MOST_CHUNKS {
        let chunks: Vec<_> = chunks(seq, ranks * chunks_a_rank).collect();
        let costs: Vec<u64> = chunks.iter().map(|chunk| work[chunk.end] - work[chunk.start]).collect();
        let owners = deal(&costs, ranks);
        let imbalance = imbalance(&loads(&costs, &owners, ranks));
        if best.as_ref().is_none_or(|(least, _, _)| imbalance < *least) {
            best = Some((imbalance, chunks, owners));
        }
        if imbalance <= GOOD_ENOUGH || chunks_a_rank * ranks >= seq {
            break;
        }
        chunks_a_rank *= 2;
    }
    let Some((_, chunks, owners)) = best else { return Sharding::new(seq, vec![]) };
    let mut ranges = vec![Vec::new(); ranks];
    for (chunk, owner) in chunks.into_iter().zip(owners) {
        ranges[owner].push(chunk);
    }
    Sharding::new(seq, ranges)
}

/// The number of query-key pairs of the queries before each position, over all sequences of the batch.
fn work_before(mask: &Mask, batch: usize, seq: usize) -> Result<Vec<u64>> {
    let mut work = vec![0; seq + 1];
    for (count, lengths) in mask.rows(batch, seq)? {
        let mut position = 1;
        for length in lengths {
            for seen in 1..=length as u64 {
                work[position] += count as u64 * if mask.is_causal() { seen } else { length as u64 };
                position += 1;
            }
        }
    }
    let mut sum = 0;
    for entry in &mut work {
        sum += *entry;
        *entry = sum;
    }
    Ok(work)
}

/// Gives each chunk an owner, every rank as many: the most costly first, each to the least loaded rank that has room
/// (Graham 1969), then exchanges between the most loaded rank and another while that helps.
fn deal(costs: &[u64], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&chunk| (std::cmp::Reverse(costs[chunk]), chunk));
    let mut owners = vec![0; costs.len()];
    let mut load = vec![0; ranks];
    let mut room = vec![costs.len() / ranks; ranks];
    for chunk in order {
        let Some(rank) = (0..ranks).filter(|&rank| room[rank] > 0).min_by_key(|&rank| (load[rank], rank)) else {
            break;
        };
        owners[chunk] = rank;
        load[rank] += costs[chunk];
        room[rank] -= 1;
    }
    // Each exchange lowers the highest load or the number of ranks that have it, so this ends; the bound is for speed.
    for _ in 0..costs.len() {
        let load = loads(costs, &owners, ranks);
        if !exchange(costs, &mut owners, &load) {
            break;
        }
    }
    owners
}

/// The exchange of two chunks that leaves the most loaded rank and the other with the lowest maximum; false where none
/// lowers it.
fn exchange(costs: &[u64], owners: &mut [usize], load: &[u64]) -> bool {
    let Some(heaviest) = (0..load.len()).max_by_key(|&rank| (load[rank], rank)) else { return false };
    let mut best = (load[heaviest], 0, 0);
    for (mine, _) in owners.iter().enumerate().filter(|(_, owner)| **owner == heaviest) {
        for (theirs, &other) in owners.iter().enumerate() {
            if other != heaviest && costs[theirs] < costs[mine] {
                let moved = costs[mine] - costs[theirs];
                let highest = (load[heaviest] - moved).max(load[other] + moved);
                best = best.min((highest, mine, theirs));
            }
        }
    }
    if best.0 == load[heaviest] {
        return false;
    }
    owners.swap(best.1, best.2);
    true
}

fn loads(costs: &[u64], owners: &[usize], ranks: usize) -> Vec<u64> {
    let mut load = vec![0; ranks];
    for (&cost, &owner) in costs.iter().zip(owners) {
        load[owner] += cost;
    }
    load
}

/// The highest load over the mean.
fn imbalance(load: &[u64]) -> f64 {
    let (sum, highest) = (load.iter().sum::<u64>(), load.iter().max().copied().unwrap_or(0));
    if sum == 0 { 1.0 } else { highest as f64 * load.len() as f64 / sum as f64 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ferrotitan_nn::Documents;

    #[test]
    fn without_documents_the_balancer_finds_head_tail() {
        for ranks in [1, 2, 3, 4, 8] {
            let found = Balance::Documents.sharding(&Mask::causal(), 2, 960, ranks).unwrap();
            let mut held: Vec<_> = (0..ranks).map(|rank| found.ranges(rank).to_vec()).collect();
            let expected = Sharding::head_tail(960, ranks).unwrap();
            let mut expected: Vec<_> = (0..ranks).map(|rank| expected.ranges(rank).to_vec()).collect();
            held.sort_by_key(|ranges| ranges[0].start);
            expected.sort_by_key(|ranges| ranges[0].start);
            assert_eq!(held, expected);
        }
    }

    #[test]
    fn work_is_counted_by_hand() {
        let documents = Documents::from_lengths(vec![vec![2, 3], vec![4, 1], vec![4, 1]]).unwrap();
        let mask = Mask::causal().within(documents.clone());
        // 1 2 | 1 2 3, and twice 1 2 3 4 | 1.
        assert_eq!(work_before(&mask, 3, 5).unwrap(), [0, 3, 9, 16, 26, 31]);
        let mask = Mask::full().within(documents);
        assert_eq!(work_before(&mask, 3, 5).unwrap(), [0, 10, 20, 31, 42, 47]);
        let message = work_before(&mask, 2, 5).unwrap_err().to_string();
        assert!(message.contains("documents of 3 sequences") && message.contains("2 sequences with 5"), "{message}");
    }

    #[test]
    fn names_of_balancers() {
        assert_eq!("headtail".parse::<Balance>().unwrap(), Balance::HeadTail);
        assert_eq!("ptrr".parse::<Balance>().unwrap(), Balance::Documents);
        let message = "zigzag".parse::<Balance>().unwrap_err().to_string();
        assert!(message.contains("zigzag") && message.contains("\"headtail\""), "{message}");
    }
}
