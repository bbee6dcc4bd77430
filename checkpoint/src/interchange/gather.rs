//! Parts of a tensor that lies row-major in a file.

use std::collections::VecDeque;
use std::ops::Range;

use ferrotitan_mesh::Region;

use crate::store::Pending;
use crate::{Result, Store};

/// Bytes of one request.
const WINDOW: u64 = 8 << 20;
/// Bytes between two wanted parts that are read along, since a request of their own would take longer.
const GAP: u64 = 16 << 10;
/// Parts of one request.
const PARTS: usize = 1 << 14;
/// Requests under way at once.
const CONCURRENT: usize = 4;

/// A box of a tensor that lies row-major in a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) store: &'a Store,
    pub(super) path: &'a str,
    /// The first byte.
    pub(super) start: u64,
    /// The box, which some file is known to hold in full.
    pub(super) region: &'a Region,
    /// The bytes of an element.
    pub(super) size: usize,
}

impl Stored<'_> {
    /// Copies what the box has of `want` to where it belongs in `out`, the row-major bytes of `want`.
    pub(super) fn copy_to(self, want: &Region, out: &mut [u8]) -> Result<()> {
        let Some(common) = self.region.intersect(want) else { return Ok(()) };
        let mut targets = common.runs_in(want);
        // Both sides give the elements in the same order, in runs of different lengths.
        let mut target = 0..0;
        let mut windows = self.windows(&common);
        let mut flying: VecDeque<(Pending<_>, Window)> = VecDeque::new();
        loop {
            while flying.len() < CONCURRENT
                && let Some(window) = windows.next()
            {
                flying.push_back((self.store.get_range_start(self.path, window.range.clone())?, window));
            }
            let Some((pending, window)) = flying.pop_front() else { return Ok(()) };
            let bytes = self.store.whole(self.path, &window.range, pending.wait()?)?;
            for mut part in window.parts {
                while !part.is_empty() {
                    if target.is_empty() {
                        // There are as many elements on both sides.
                        let Some((start, length)) = targets.next() else { return Ok(()) };
                        target = start * self.size..(start + length) * self.size;
                    }
                    let length = part.len().min(target.len());
                    out[target.start..target.start + length].copy_from_slice(&bytes[part.start..part.start + length]);
                    part.start += length;
                    target.start += length;
                }
            }
        }
    }

    /// What to read, in order.
    fn windows(self, common: &Region) -> impl Iterator<Item = Window> {
        let size = self.size as u64;
        let mut runs = common.runs_in(self.region).map(move |(start, length)| {
            let start = self.start + start as u64 * size;
            start..start + length as u64 * size
        });
        let mut left = runs.next();
        std::iter::from_fn(move || {
            let first = left.as_ref()?.start;
            let mut window = Window { range: first..first, parts: Vec::new() };
            while let Some(run) = &mut left {
                let reach = first + WINDOW;
                if run.start.saturating_sub(window.range.end) > GAP || run.start >= reach || window.parts.len() == PARTS
                {
                    break;
                }
                let end = run.end.min(reach);
                window.parts.push((run.start - first) as usize..(end - first) as usize);
                window.range.end = end;
                run.start = end;
                if run.is_empty() {
                    left = runs.next();
                }
            }
            Some(window)
        })
    }
}

/// Bytes of a file to read at once, and the parts of them that are wanted.
#[derive(Debug)]
struct Window {
    range: Range<u64>,
    parts: Vec<Range<usize>>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn only_what_a_region_needs_is_read_in_requests_of_bounded_size() {
        let store = Store::from_object_store(Arc::new(InMemory::new()), "folder").unwrap();
        let (start, shape) = (5, [9, 1_500_000]);
        let bytes: Vec<u8> = (0..13_500_005_u32).map(|at| (at % 251) as u8).collect();
        store.put("file", bytes.clone().into()).unwrap();
        let whole = Region::whole(&shape);
        let stored = Stored { store: &store, path: "file", start, region: &whole, size: 1 };
        for (offset, shape, most) in [
            ([0, 0], [9, 1_500_000], 13_500_000),
            ([3, 7], [5, 1], 5),
            ([1, 100], [8, 1_000_000], 8_000_000),
            ([0, 1_499_999], [9, 1], 9),
            ([2, 0], [6, 1_495_000], 6 * 1_495_000 + 5 * 5000),
        ] {
            let want = Region { offset: offset.to_vec(), shape: shape.to_vec() };
            let windows: Vec<_> = stored.windows(&want).collect();
            assert!(windows.iter().all(|window| window.range.end - window.range.start <= WINDOW));
            assert!(windows.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start));
            assert_eq!(windows.iter().map(|window| window.range.end - window.range.start).sum::<u64>(), most);

            let mut out = vec![0; want.numel()];
            stored.copy_to(&want, &mut out).unwrap();
            for (row, found) in out.chunks(shape[1]).enumerate() {
                let first = start as usize + (offset[0] + row) * 1_500_000 + offset[1];
                assert!(found == &bytes[first..first + shape[1]]);
            }
        }
    }
}
