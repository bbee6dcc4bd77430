//! Boxes of a global tensor.

use std::ops::Range;

/// A box in the global coordinates of a tensor, in elements. `offset` and `shape` have one entry per axis.
///
/// A rank keeps the region it holds as one row-major buffer of [`Region::numel`] elements.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Region {
    /// The first index along each axis.
    pub offset: Vec<usize>,
    /// The length along each axis.
    pub shape: Vec<usize>,
}

impl Region {
    /// All of a tensor of this shape.
    pub fn whole(shape: &[usize]) -> Self {
        Region { offset: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// The number of elements. A scalar has one; a product beyond `usize` counts as `usize::MAX`.
    pub fn numel(&self) -> usize {
        numel(&self.shape)
    }

    /// The indices along each axis.
    pub fn ranges(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + '_ {
        self.offset.iter().zip(&self.shape).map(|(&start, &length)| start..start.saturating_add(length))
    }

    /// What both hold; `None` when that is no element, or when they differ in the number of axes.
    pub fn intersect(&self, other: &Region) -> Option<Region> {
        if self.shape.len() != other.shape.len() {
            return None;
        }
        let common = self.ranges().zip(other.ranges()).map(|(a, b)| a.start.max(b.start)..a.end.min(b.end));
        let (offset, shape) = common
            .map(|range| (!range.is_empty()).then_some((range.start, range.len())))
            .collect::<Option<(Vec<_>, Vec<_>)>>()?;
        Some(Region { offset, shape })
    }

    /// Whether every element of `other` is in it. An empty region of as many axes is in every region.
    pub fn contains(&self, other: &Region) -> bool {
        let inside = || self.ranges().zip(other.ranges()).all(|(a, b)| a.start <= b.start && b.end <= a.end);
        self.shape.len() == other.shape.len() && (other.numel() == 0 || inside())
    }

    /// The same elements in the coordinates of `outer`; `None` when `outer` does not contain it.
    pub fn relative_to(&self, outer: &Region) -> Option<Region> {
        if !outer.contains(self) {
            return None;
        }
        let offset = self.offset.iter().zip(&outer.offset).map(|(inner, outer)| inner.saturating_sub(*outer)).collect();
        Some(Region { offset, shape: self.shape.clone() })
    }

    /// The contiguous runs that the part of it inside `outer` forms in the row-major buffer of `outer`: start and
    /// length in elements, in order, each as long as can be.
    pub fn runs_in(&self, outer: &Region) -> Runs {
        match self.intersect(outer) {
            Some(inner) => Runs::new(&inner, outer),
            None => Runs::default(),
        }
    }
}

/// The number of elements of a shape, at most `usize::MAX`.
pub(crate) fn numel(shape: &[usize]) -> usize {
    // A zero makes the whole product zero, also behind a product that is too large.
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |numel, &length| numel.saturating_mul(length)) }
}

/// Part `index` of `count` balanced parts of a range: sizes differ by at most 1, the larger ones first.
pub(crate) fn even(range: Range<usize>, index: usize, count: usize) -> Range<usize> {
    let (base, larger) = (range.len() / count, range.len() % count);
    let cut = |index: usize| range.start + index * base + index.min(larger);
    cut(index)..cut(index + 1)
}

/// The contiguous runs of a region in a buffer: see [`Region::runs_in`].
#[derive(Clone, Debug, Default)]
pub struct Runs {
    /// The leading axes, over which the runs repeat: how often, how far apart, and which repetition comes next.
    axes: Vec<Axis>,
    start: usize,
    length: usize,
    left: usize,
}

#[derive(Clone, Debug)]
struct Axis {
    length: usize,
    stride: usize,
    index: usize,
}

impl Runs {
    /// `inner` has at least one element and lies inside `outer`.
    fn new(inner: &Region, outer: &Region) -> Self {
        let mut axes = Vec::new();
        let (mut start, mut stride, mut length) = (0_usize, 1_usize, 1_usize);
        // From the innermost axis outwards, a run grows as long as all axes below are whole.
        for axis in (0..inner.shape.len()).rev() {
            start = start.saturating_add((inner.offset[axis] - outer.offset[axis]).saturating_mul(stride));
            if length == stride {
                length = length.saturating_mul(inner.shape[axis]);
            } else {
                axes.push(Axis { length: inner.shape[axis], stride, index: 0 });
            }
            stride = stride.saturating_mul(outer.shape[axis]);
        }
        let left = axes.iter().fold(1, |left: usize, axis| left.saturating_mul(axis.length));
        Runs { axes, start, length, left }
    }
}

impl Iterator for Runs {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let run = (self.start, self.length);
        for axis in &mut self.axes {
            axis.index += 1;
            self.start = self.start.wrapping_add(axis.stride);
            if axis.index < axis.length {
                break;
            }
            self.start = self.start.wrapping_sub(axis.length.wrapping_mul(axis.stride));
            axis.index = 0;
        }
        Some(run)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Runs {}
