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
                if run.start.saturating_sub(window.range.end) > GAP || run.start >= reach || window.parts.len() == PARTS {
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
