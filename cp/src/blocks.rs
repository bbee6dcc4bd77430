//! Which queries meet which keys: attention over ranges of a sequence as a list of dense and triangular blocks.

use std::ops::Range;

/// Queries that meet keys, both as positions in tensors that hold the tokens of some ranges one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) queries: Range<i64>,
    pub(crate) keys: Range<i64>,
    /// Whether the `i`th query sees the keys up to the `i`th alone; there are then as many of both. Else it sees all.
    pub(crate) causal: bool,
    /// Whether these queries have met no key before.
    pub(crate) first: bool,
}

impl Block {
    /// Number of pairs of a query and a key that it sees.
    pub(crate) fn pairs(&self) -> u64 {
        let (queries, keys) =
            ((self.queries.end - self.queries.start) as u64, (self.keys.end - self.keys.start) as u64);
        if self.causal { queries * (queries + 1) / 2 } else { queries * keys }
    }
}

/// The blocks of the queries of some ranges and the keys of others.
///
/// Ranges are global and ascend. `own` says that queries and keys are the same tokens, whose blocks are run before all
/// others. Neighbouring blocks are joined where they can be, so that under a causal mask a rank's own tokens are one
/// triangle a document, and the head-tail order gives one dense block a pair of ranks.
pub(crate) fn blocks(
    queries: &[Range<i64>],
    keys: &[Range<i64>],
    documents: &[Range<i64>],
    causal: bool,
    own: bool,
) -> Vec<Block> {
    let (queries, keys) = (pieces(queries, documents), pieces(keys, documents));
    let mut all = Vec::new();
    let mut rest = keys.as_slice();
    for queries in queries.chunk_by(|a, b| a.document == b.document) {
        let document = queries[0].document;
        rest = &rest[rest.partition_point(|piece| piece.document < document)..];
        let keys = &rest[..rest.partition_point(|piece| piece.document == document)];
        if keys.is_empty() {
            continue;
        }
        if causal {
            staircase(queries, keys, &mut all);
        } else {
            all.push(Block { queries: held(queries), keys: held(keys), causal: false, first: own });
        }
    }
    all
}

/// Part of a range that lies within one document.
#[derive(Debug, Clone)]
struct Piece {
    document: usize,
    global: Range<i64>,
    /// Where its first token is in the tensor.
    local: i64,
}

/// Cuts ranges at the ends of documents.
fn pieces(ranges: &[Range<i64>], documents: &[Range<i64>]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut document, mut local) = (0, 0);
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            while document < documents.len() && documents[document].end <= start {
                document += 1;
            }
            let end = documents.get(document).map_or(range.end, |document| document.end.min(range.end));
            pieces.push(Piece { document, global: start..end, local });
            local += end - start;
            start = end;
        }
    }
    pieces
}

/// Where the tokens of consecutive pieces are in the tensor.
fn held(pieces: &[Piece]) -> Range<i64> {
    let last = &pieces[pieces.len() - 1];
    pieces[0].local..last.local + last.global.end - last.global.start
}

/// Consecutive queries, the keys that all of them see, and whether a triangle of as many keys follows on those.
struct Step {
    queries: Range<i64>,
    seen: Range<i64>,
    triangle: bool,
}

impl Step {
    /// Takes the next queries in, where they go on as these do.
    fn join(&mut self, next: &Step) -> bool {
        let below = if self.triangle { self.queries.end - self.queries.start } else { 0 };
        let fits = self.triangle == next.triangle && next.seen.end == self.seen.end + below;
        if fits {
            self.queries.end = next.queries.end;
        }
        fits
    }

    fn blocks(self, all: &mut Vec<Block>) {
        let Step { queries, seen, triangle } = self;
        if triangle {
            let keys = seen.end..seen.end + queries.end - queries.start;
            all.push(Block { queries: queries.clone(), keys, causal: true, first: true });
        }
        if !seen.is_empty() {
            all.push(Block { queries, keys: seen, causal: false, first: false });
        }
    }
}

/// The blocks of a causal mask within one document: with each range of queries begins a step, which sees more keys.
fn staircase(queries: &[Piece], keys: &[Piece], all: &mut Vec<Block>) {
    let first_key = keys[0].local;
    let mut open: Option<Step> = None;
    for piece in queries {
        let inside = |at: &i64| piece.global.start < *at && *at < piece.global.end;
        let mut cuts = vec![piece.global.start];
        cuts.extend(keys.iter().flat_map(|key| [key.global.start, key.global.end]).filter(inside));
        cuts.push(piece.global.end);
        // A key range that begins where another ends gives the same cut twice.
        cuts.dedup();
        for cut in cuts.windows(2) {
            let (start, end) = (cut[0], cut[1]);
            let before = keys.iter().map(|key| start.clamp(key.global.start, key.global.end) - key.global.start);
            let local = piece.local + start - piece.global.start;
            let step = Step {
                queries: local..local + end - start,
                seen: first_key..first_key + before.sum::<i64>(),
                triangle: keys.iter().any(|key| key.global.contains(&start)),
            };
            if open.as_mut().is_some_and(|last| last.join(&step)) {
                continue;
            }
            if let Some(last) = open.replace(step) {
                last.blocks(all);
            }
        }
    }
    if let Some(last) = open {
        last.blocks(all);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
mod tests {
    use super::*;
    use crate::mask::consecutive;
    use proptest::prelude::*;

    fn block(queries: Range<i64>, keys: Range<i64>, causal: bool) -> Block {
        Block { queries, keys, causal, first: causal }
    }

    #[test]
    fn head_tail_is_two_chunks_a_pair() {
        // Four chunks of 4: rank 0 holds 0 and 3, rank 1 holds 1 and 2.
        let (zero, one) = ([0..4, 12..16], [4..12]);
        let whole = [0..16];
        assert_eq!(blocks(&zero, &zero, &whole, true, true), [block(0..8, 0..8, true)]);
        assert_eq!(blocks(&one, &one, &whole, true, true), [block(0..8, 0..8, true)]);
        assert_eq!(blocks(&zero, &one, &whole, true, false), [block(4..8, 0..8, false)]);
        assert_eq!(blocks(&one, &zero, &whole, true, false), [block(0..8, 0..4, false)]);
    }

    #[test]
    fn queries_within_a_longer_range_of_keys() {
        let found = blocks(&[2..4, 8..9], &[0..6], &[0..10], true, false);
        assert_eq!(found, [block(0..2, 2..4, true), block(0..2, 0..2, false), block(2..3, 0..6, false)]);
    }

    fn ranges(of: u64, owners: &[u64]) -> Vec<Range<i64>> {
        let mut ranges: Vec<Range<i64>> = Vec::new();
        for (token, _) in owners.iter().enumerate().filter(|(_, owner)| **owner & of != 0) {
            let token = token as i64;
            match ranges.last_mut() {
                Some(last) if last.end == token => last.end += 1,
                _ => ranges.push(token..token + 1),
            }
        }
        ranges
    }

    proptest! {
        /// Against the mask, pair by pair: each visible pair is in exactly one block, and no other is.
        #[test]
        fn every_visible_pair_once(
            owners in prop::collection::vec(0u64..4, 1..40),
            lengths in prop::collection::vec(1i64..12, 40),
            causal: bool,
            same: bool,
        ) {
            let total = owners.len() as i64;
            let mut left = total;
            let lengths: Vec<i64> = lengths.into_iter().map(|n| { let n = n.min(left); left -= n; n }).filter(|&n| n > 0).collect();
            let documents = consecutive(lengths.into_iter().chain((left > 0).then_some(left)));
            let document = |token: i64| documents.iter().position(|d| d.contains(&token)).unwrap();
            let queries = ranges(1, &owners);
            let keys = if same { queries.clone() } else { ranges(2, &owners) };
            let tokens = |ranges: &[Range<i64>]| ranges.iter().cloned().flatten().collect::<Vec<_>>();
            let (query_tokens, key_tokens) = (tokens(&queries), tokens(&keys));
            let mut met = vec![vec![0; key_tokens.len()]; query_tokens.len()];
            let mut touched = vec![false; query_tokens.len()];
            let mut pairs = 0;
            for block in blocks(&queries, &keys, &documents, causal, same) {
                prop_assert!(!block.queries.is_empty() && !block.keys.is_empty());
                prop_assert!(!block.causal || block.queries.end - block.queries.start == block.keys.end - block.keys.start);
                pairs += block.pairs();
                for (row, query) in block.queries.clone().enumerate() {
                    if same {
                        prop_assert_eq!(block.first, !touched[query as usize]);
                    }
                    touched[query as usize] = true;
                    for (column, key) in block.keys.clone().enumerate() {
                        met[query as usize][key as usize] += i32::from(!block.causal || column <= row);
                    }
                }
            }
            let mut expected = 0;
            for (q, &query) in query_tokens.iter().enumerate() {
                for (k, &key) in key_tokens.iter().enumerate() {
                    let sees = document(query) == document(key) && (!causal || key <= query);
                    prop_assert_eq!(met[q][k], i32::from(sees), "query {} key {}", query, key);
                    expected += u64::from(sees);
                }
            }
            prop_assert_eq!(pairs, expected);
            prop_assert!(!same || touched.iter().all(|&touched| touched));
        }
    }
}
