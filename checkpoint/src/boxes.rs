//! Boxes of a tensor: cut to a size, and checked to make up the whole.

use ferrotitan_mesh::Region;

/// Cuts a region into pieces of at most `limit` bytes (or one element), each of them contiguous in the row-major buffer
/// of the region, in its order. A region without elements has no piece.
pub(crate) fn pieces(region: &Region, element: usize, limit: usize) -> Vec<Region> {
    let mut pieces = Vec::new();
    if region.numel() > 0 {
        cut(region.clone(), 0, (limit / element.max(1)).max(1), &mut pieces);
    }
    pieces
}

/// Cuts along `axis` and, where one index of it is too large still, along the axes after it.
fn cut(region: Region, axis: usize, limit: usize, pieces: &mut Vec<Region>) {
    if region.numel() <= limit || axis == region.shape.len() {
        return pieces.push(region);
    }
    let row = region.numel() / region.shape[axis];
    let step = (limit / row.max(1)).max(1);
    let (start, end) = (region.offset[axis], region.offset[axis] + region.shape[axis]);
    for first in (start..end).step_by(step) {
        let mut piece = region.clone();
        (piece.offset[axis], piece.shape[axis]) = (first, step.min(end - first));
        cut(piece, axis + 1, limit, pieces);
    }
}

/// Checks that boxes, all inside a tensor of this shape and none of them empty, hold each of its elements once; else
/// says what does not hold.
pub(crate) fn check_cover(shape: &[usize], boxes: &[&Region]) -> Result<(), String> {
    let whole = Region::whole(shape);
    let mut sorted = boxes.to_vec();
    // Along the axis with the most cuts, few boxes meet each other.
    let cuts = |axis: &usize| {
        let mut starts: Vec<_> = boxes.iter().map(|region| region.offset[*axis]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    if let Some(axis) = (0..shape.len()).max_by_key(cuts) {
        sorted.sort_by_key(|region| region.offset[axis]);
        for (index, region) in sorted.iter().enumerate() {
            let end = region.offset[axis].saturating_add(region.shape[axis]);
            let meets = |other: &&&Region| other.offset[axis] < end;
            let others = &mut sorted[index + 1..].iter().take_while(meets);
            if let Some(common) = others.find_map(|other| region.intersect(other)) {
                return Err(format!("several parts hold {}", show(&common)));
            }
        }
    } else if boxes.len() > 1 {
        return Err("several parts hold it".to_owned());
    }
    let held = boxes.iter().fold(0_usize, |held, region| held.saturating_add(region.numel()));
    if held != whole.numel() {
        return Err(format!("its parts hold {held} of {} elements", whole.numel()));
    }
    Ok(())
}

/// A region as a slice is written: `[0..4, 8..16]`.
fn show(region: &Region) -> String {
    format!("{:?}", region.ranges().collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_the_region_in_its_order(
            axes in prop::collection::vec((0_usize..4, 0_usize..5), 0..4), limit in 1_usize..40
        ) {
            let (offset, shape) = axes.into_iter().unzip();
            let region = Region { offset, shape };
            let pieces = pieces(&region, 2, limit);
            let mut next = 0;
            for piece in &pieces {
                prop_assert!(piece.numel() * 2 <= limit.max(2));
                let runs: Vec<_> = piece.runs_in(&region).collect();
                prop_assert_eq!(runs, vec![(next, piece.numel())]);
                next += piece.numel();
            }
            prop_assert_eq!(next, region.numel());
        }

        #[test]
        fn covers_are_told_from_others(
            shape in prop::collection::vec(1_usize..6, 0..4), limit in 1_usize..20, change in 0_usize..4, at in 0_usize..99
        ) {
            let mut parts = pieces(&Region::whole(&shape), 1, limit);
            prop_assert_eq!(check_cover(&shape, &parts.iter().collect::<Vec<_>>()), Ok(()));
            let at = at % parts.len();
            match change {
                0 => drop(parts.remove(at)),
                1 => parts.push(parts[at].clone()),
                // As many elements as there should be, but some of them twice.
                _ => {
                    let twin = parts.iter().position(|part| part.shape == parts[at].shape && *part != parts[at]);
                    let Some(twin) = twin else { return Ok(()) };
                    parts[at] = parts[twin].clone();
                }
            }
            prop_assert!(check_cover(&shape, &parts.iter().collect::<Vec<_>>()).is_err());
        }
    }
}
