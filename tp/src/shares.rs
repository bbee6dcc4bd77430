//! Balanced shares: how sequences and vocabularies that need not divide are dealt to ranks.

use std::ops::Range;

/// Share `index` of `count` of the indices below `length`: lengths differ by at most 1, the longer ones first, as in
/// `mesh::Parts::Even`.
pub(crate) fn share(length: usize, index: usize, count: usize) -> Range<usize> {
    let (base, longer) = (length / count, length % count);
    let cut = |index: usize| index * base + index.min(longer);
    cut(index)..cut(index + 1)
}

/// The lengths of all shares.
pub(crate) fn share_lengths(length: usize, count: usize) -> Vec<usize> {
    (0..count).map(|index| share(length, index, count).len()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ferrotitan_mesh::{Degrees, Grid, Layout, Parts, View};

    use super::*;

    #[test]
    fn shares_are_those_of_a_layout() {
        for (length, tp) in (0..20).flat_map(|length| (1..9).map(move |tp| (length, tp))) {
            let layout = Layout::replicated(&[length]).shard(View::TP, 0, Parts::Even).unwrap();
            for grid in Grid::all(Degrees { tp, ..Degrees::default() }).unwrap() {
                let region = layout.local_region(&grid);
                let rank = ferrotitan_mesh::Mesh::rank(&grid);
                assert_eq!(share(length, rank, tp), region.offset[0]..region.offset[0] + region.shape[0]);
                assert_eq!(share_lengths(length, tp)[rank], region.shape[0]);
            }
        }
    }
}
