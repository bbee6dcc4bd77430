//! Random cases that every rank draws alike.

use tch::{Device, Kind, Tensor};

use super::told;
use crate::Group;

/// A small generator (SplitMix64), so that every rank and every process draws the same from the same seed.
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Draw(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// The numbers below `count` in a random order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

/// Tensors of all ranks of a group, drawn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    /// The other axes' lengths; the one at `axis` is replaced by what the collective needs.
    pub shape: Vec<usize>,
    /// The axis that is cut or concatenated.
    pub axis: usize,
    /// Another axis or the same one, for exchanges.
    pub other_axis: usize,
    /// One length a rank along `axis`. Longer lists than the group are cut off.
    pub sizes: Vec<usize>,
    /// One length a rank along `other_axis`.
    pub other_sizes: Vec<usize>,
    /// The element type.
    pub kind: Kind,
    /// What the values are drawn from.
    pub seed: u64,
}

impl Case {
    /// Element types that every backend can combine.
    pub const NUMBERS: [Kind; 6] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64, Kind::Half, Kind::Int];
    /// Element types that every backend can move.
    pub const KINDS: [Kind; 7] =
        [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64, Kind::Uint8, Kind::Bool, Kind::Float8e4m3fn];

    /// The case of a seed, for groups of up to 8 ranks.
    pub fn draw(seed: u64, kinds: &[Kind]) -> Self {
        let mut draw = Draw::new(seed);
        let rank = 1 + draw.below(3);
        let shape = (0..rank).map(|_| 1 + draw.below(4)).collect();
        let (axis, other_axis) = (draw.below(rank), draw.below(rank));
        // A quarter of the cases is even, since backends take another way there.
        let even = draw.below(4) == 0;
        let length = draw.below(4);
        let mut sizes = || (0..8).map(|_| if even { length } else { draw.below(4) }).collect();
        let (sizes, other_sizes) = (sizes(), sizes());
        Case { shape, axis, other_axis, sizes, other_sizes, kind: draw.pick(kinds), seed: draw.bits() }
    }

    /// The lengths along `axis` in a group of `size`.
    pub fn sizes(&self, size: usize) -> &[usize] {
        &self.sizes[..size]
    }

    /// The shape with another length along `axis`.
    pub(super) fn shape_with(&self, axis: usize, length: usize) -> Vec<i64> {
        let mut shape: Vec<i64> = self.shape.iter().map(|&length| length as i64).collect();
        shape[axis] = length as i64;
        shape
    }

    /// What world rank `rank` holds: small numbers, which all kinds hold and add up exactly. Some are not contiguous.
    pub(super) fn values(&self, rank: usize, shape: &[i64]) -> Result<Tensor, String> {
        let mut draw = Draw::new(self.seed ^ (rank as u64).wrapping_mul(0x2545_f491_4f6c_dd1d));
        let strided = draw.below(3) == 0;
        let count: i64 = shape.iter().product();
        let values: Vec<i64> = (0..2 * count).map(|_| draw.pick(&[-1, 1, 2, 3])).collect();
        let values = Tensor::from_slice(&values);
        let values = match self.kind {
            Kind::Uint8 | Kind::Bool => values.f_abs().map_err(told)?,
            _ => values,
        };
        let values = values.f_to_kind(Kind::Float).map_err(told)?;
        let made = match strided {
            true => {
                let wider: Vec<i64> = shape.iter().copied().chain([2]).collect();
                values.f_to_kind(self.kind).and_then(|values| values.f_view(wider.as_slice())?.f_select(-1, 1))
            }
            false => values.f_to_kind(self.kind).and_then(|values| values.f_narrow(0, 0, count)?.f_view(shape)),
        };
        made.map_err(told)
    }

    /// What this rank holds, on the group's device.
    pub(super) fn own(&self, group: &Group, shape: &[i64]) -> Result<Tensor, String> {
        self.values(group.ranks()[group.rank()], shape)?.f_to_device(group.device()).map_err(told)
    }
}

/// Whether two tensors are the same in shape, kind and every value; which may be moved between devices for it.
pub(super) fn same(found: &Tensor, expected: &Tensor) -> Result<(), String> {
    if found.size() != expected.size() || found.kind() != expected.kind() {
        let (found, expected) = ((found.kind(), found.size()), (expected.kind(), expected.size()));
        return Err(format!("got {found:?} instead of {expected:?}"));
    }
    let wide = |tensor: &Tensor| tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double);
    let (found, expected) = (wide(found).map_err(told)?, wide(expected).map_err(told)?);
    match found.f_equal(&expected).map_err(told)? {
        true => Ok(()),
        false => Err(format!("got {} instead of {}", listed(&found), listed(&expected))),
    }
}

/// The first few values.
fn listed(tensor: &Tensor) -> String {
    let values = tensor.f_reshape([-1]).and_then(|flat| Vec::<f64>::try_from(&flat));
    values.map_or_else(told, |values| format!("{:?}", &values[..values.len().min(24)]))
}
