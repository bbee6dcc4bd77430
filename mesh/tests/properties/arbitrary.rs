//! Random meshes and layouts, and the plain enumerations that everything is compared with.

use ferrotitan_mesh::{Degrees, Dim, Layout, Parts, Region, Split, View};
use proptest::collection::vec;
use proptest::prelude::*;

/// Choices made one after the other from random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Dice(Vec<u16>, usize);

impl Dice {
    /// A number below `n`.
    pub(crate) fn roll(&mut self, n: usize) -> usize {
        self.1 += 1;
        usize::from(self.0[self.1 % self.0.len()]) % n
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            let other = self.roll(end + 1);
            items.swap(end, other);
        }
    }
}

pub(crate) fn dice() -> impl Strategy<Value = Dice> {
    vec(any::<u16>(), 61).prop_map(|numbers| Dice(numbers, 0))
}

/// Degrees with a product of at most 64.
pub(crate) fn degrees(dice: &mut Dice) -> Degrees {
    let mut order = Dim::ALL;
    dice.shuffle(&mut order);
    let mut left = 64;
    order.into_iter().fold(Degrees::default(), |degrees, dim| {
        let n = 1 + dice.roll(left.min(5));
        left /= n;
        degrees.with(dim, n)
    })
}

/// Up to 4 axes, now and then none, of up to 9 elements, now and then none.
pub(crate) fn shape(dice: &mut Dice) -> Vec<usize> {
    let axes = dice.roll(13).div_ceil(3);
    (0..axes).map(|_| dice.roll(28).div_ceil(3)).collect()
}

/// A final layout of a tensor of this shape: nested, uneven, empty, explicit, shuffled and replicated splits.
pub(crate) fn layout(dice: &mut Dice, shape: &[usize], degrees: &Degrees) -> Layout {
    let stages: Vec<_> = {
        let mut all: Vec<_> = (0..degrees.pp).collect();
        dice.shuffle(&mut all);
        all.truncate(1 + dice.roll(degrees.pp));
        all
    };
    let layout = Layout::replicated(shape).held_by_stages(&stages);
    if shape.is_empty() {
        return layout;
    }
    let mut views = [View::NONE; 4];
    for dim in [Dim::DpReplicate, Dim::DpShard, Dim::Cp, Dim::Tp] {
        let view = &mut views[dice.roll(4)];
        *view = view.union(dim.into());
    }
    // The dimensions that the first view holds replicate the tensor.
    views[1..].iter().fold(layout, |layout, &view| {
        let axis = dice.roll(shape.len());
        let parts = parts(dice, shape[axis], degrees.size(view));
        layout.shard(view, axis, parts).unwrap()
    })
}

fn parts(dice: &mut Dice, length: usize, size: usize) -> Parts {
    if dice.roll(2) == 0 {
        return Parts::Even;
    }
    let divisors: Vec<_> = (1..=size).filter(|n| size.is_multiple_of(*n)).collect();
    let distinct = divisors[dice.roll(divisors.len())];
    let mut cuts: Vec<_> = (1..distinct).map(|_| dice.roll(length + 1)).collect();
    cuts.extend([0, length]);
    cuts.sort_unstable();
    let mut ranges: Vec<_> =
        cuts.windows(2).flat_map(|ends| std::iter::repeat_n(ends[0]..ends[1], size / distinct)).collect();
    dice.shuffle(&mut ranges);
    Parts::At(ranges)
}

/// The indices into the row-major buffer of a tensor of `global_shape` of a region's elements, in the region's order.
pub(crate) fn elements(global_shape: &[usize], region: &Region) -> Vec<usize> {
    region.ranges().zip(global_shape).fold(vec![0], |outer, (range, length)| {
        outer.into_iter().flat_map(|index| range.clone().map(move |along| index * length + along)).collect()
    })
}

/// The elements that a rank holds of an axis, from the definition of a split: a list of indices dealt out anew each time.
pub(crate) fn indices(layout: &Layout, axis: usize, index: impl Fn(View) -> usize, degrees: &Degrees) -> Vec<usize> {
    let mut left: Vec<_> = (0..layout.shape()[axis]).collect();
    for Split { view, parts, .. } in layout.splits().iter().filter(|split| split.axis == axis) {
        let mine = index(*view);
        left = match parts {
            Parts::At(ranges) => left.into_iter().filter(|element| ranges[mine].contains(element)).collect(),
            Parts::Even => {
                let mut sizes = vec![0; degrees.size(*view)];
                (0..left.len()).for_each(|nth| sizes[nth % degrees.size(*view)] += 1);
                left.into_iter().skip(sizes[..mine].iter().sum()).take(sizes[mine]).collect()
            }
        };
    }
    left
}
