//! Where the parts of a unit's tensors lie in one flat buffer, so that one collective moves them all.
//!
//! The buffer holds rank after rank, and of each rank its part of tensor after tensor, row-major and without gaps: what
//! an uneven all-gather of the ranks' own stretches gives, and what an uneven reduce-scatter takes. Tensors of several
//! dtypes travel as bytes, each part aligned for any of them.

use ferrotitan_mesh::{Layout, Mesh, Region, View};
use tch::{Kind, TchError, Tensor};

/// To how many bytes parts are aligned where dtypes are mixed: no dtype is wider.
const ALIGNMENT: usize = 16;

/// One tensor and how the sharding group holds it.
#[derive(Debug)]
pub(crate) struct Extent {
    /// What the group holds together: the global tensor, or what tensor parallelism left of it.
    shape: Vec<i64>,
    /// One box a rank, in group order, in the coordinates of that shape.
    parts: Vec<Region>,
}

impl Extent {
    /// From a layout that is divided over [`View::FSDP`] last, if at all.
    pub(crate) fn new(layout: &Layout, mesh: &dyn Mesh) -> ferrotitan_mesh::Result<Self> {
        let others = layout.splits().iter().filter(|split| !split.view.overlaps(View::FSDP)).cloned().collect();
        let whole = Layout::new(layout.shape(), others, View::NONE, &[])?.local_region(mesh);
        let (degrees, here) = (mesh.degrees(), mesh.coordinates());
        let part = |rank| {
            let region = layout.region(&degrees, &here.at(View::FSDP, rank, &degrees));
            region.relative_to(&whole).expect("a split divides what the splits before it left")
        };
        let parts = (0..degrees.size(View::FSDP)).map(part).collect();
        Ok(Self { shape: whole.shape.iter().map(|&n| n as i64).collect(), parts })
    }

    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// The shape of one rank's part.
    fn part_shape(&self, rank: usize) -> Vec<i64> {
        self.parts[rank].shape.iter().map(|&n| n as i64).collect()
    }

    /// The part of a tensor of this extent that `rank` holds, as a view.
    fn part(&self, tensor: &Tensor, rank: usize) -> Result<Tensor, TchError> {
        let mut part = tensor.shallow_clone();
        for (axis, range) in self.parts[rank].ranges().enumerate() {
            part = part.f_narrow(axis as i64, range.start as i64, range.len() as i64)?;
        }
        Ok(part)
    }

    /// The number of elements of every part, if parts are equal and each is a run of rows of the whole.
    fn even_rows(&self) -> Option<usize> {
        let first = self.parts.first()?;
        let rows = *first.shape.first()?;
        let runs = self.parts.iter().enumerate().all(|(rank, part)| {
            part.shape == first.shape
                && part.offset[0] == rank * rows
                && part.offset[1..].iter().all(|&start| start == 0)
        });
        let whole_rows = first.shape[1..].iter().zip(&self.shape[1..]).all(|(&part, &whole)| part as i64 == whole);
        (runs && whole_rows && first.numel() > 0).then(|| first.numel())
    }
}

/// Where every part of several tensors lies. All lengths are in elements of the buffer.
#[derive(Debug)]
pub(crate) struct Packing {
    kind: Kind,
    /// The length of each rank's stretch.
    sizes: Vec<usize>,
    tensors: Vec<Place>,
}

/// One tensor's parts in the buffer.
#[derive(Debug)]
struct Place {
    kind: Kind,
    /// How many elements of the buffer one of the tensor's takes.
    width: usize,
    /// Where each rank's part begins, counted from the rank's stretch.
    offsets: Vec<usize>,
}

impl Packing {
    /// Places tensors that travel in the given dtypes.
    pub(crate) fn new<'a>(tensors: impl IntoIterator<Item = (&'a Extent, Kind)>, ranks: usize) -> Self {
        let tensors: Vec<_> = tensors.into_iter().collect();
        let mut kinds = tensors.iter().map(|(_, kind)| *kind);
        let kind = match kinds.next() {
            Some(first) if kinds.all(|kind| kind == first) => first,
            _ => Kind::Uint8,
        };
        let mut sizes = vec![0_usize; ranks];
        let place = |(extent, of): (&Extent, Kind)| {
            let (width, align) = match of == kind {
                true => (1, 1),
                false => (of.elt_size_in_bytes(), ALIGNMENT),
            };
            let offsets = sizes.iter_mut().zip(&extent.parts).map(|(size, part)| {
                let offset = size.next_multiple_of(align);
                *size = offset + part.numel() * width;
                offset
            });
            Place { kind: of, width, offsets: offsets.collect() }
        };
        let tensors: Vec<Place> = tensors.into_iter().map(place).collect();
        if tensors.iter().any(|place| place.kind != kind) {
            // So that the next rank's stretch begins aligned.
            sizes.iter_mut().for_each(|size| *size = size.next_multiple_of(ALIGNMENT));
        }
        Self { kind, sizes, tensors }
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// The length of each rank's stretch.
    pub(crate) fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The length of the whole buffer.
    pub(crate) fn total(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// Tensor `index`'s part of `rank`, as a view of that rank's stretch.
    pub(crate) fn own(&self, stretch: &Tensor, index: usize, rank: usize, extent: &Extent) -> Result<Tensor, TchError> {
        let place = &self.tensors[index];
        let length = extent.parts[rank].numel() * place.width;
        let flat = stretch.f_narrow(0, place.offsets[rank] as i64, length as i64)?;
        self.typed(&flat, place)?.f_view(extent.part_shape(rank).as_slice())
    }

    /// Pairs of views that cover tensor `index`: a piece of `tensor`, of the given extent, and where it lies in the whole
    /// `buffer`.
    pub(crate) fn pieces(
        &self,
        buffer: &Tensor,
        index: usize,
        tensor: &Tensor,
        extent: &Extent,
    ) -> Result<Vec<(Tensor, Tensor)>, TchError> {
        let (place, ranks) = (&self.tensors[index], self.sizes.len());
        if let Some(numel) = extent.even_rows().filter(|_| tensor.is_contiguous() && self.is_regular(place)) {
            // One copy for all ranks.
            let shape = [ranks as i64, (numel * place.width) as i64];
            let (stride, offset) = (self.sizes[0] as i64, buffer.storage_offset() + place.offsets[0] as i64);
            let strided = buffer.f_as_strided(shape, [stride, 1], offset)?;
            return Ok(vec![(tensor.f_view([ranks as i64, numel as i64])?, self.typed(&strided, place)?)]);
        }
        let mut start = 0;
        let mut pieces = Vec::with_capacity(ranks);
        for (rank, &size) in self.sizes.iter().enumerate() {
            if extent.parts[rank].numel() > 0 {
                let stretch = buffer.f_narrow(0, start as i64, size as i64)?;
                pieces.push((extent.part(tensor, rank)?, self.own(&stretch, index, rank, extent)?));
            }
            start += size;
        }
        Ok(pieces)
    }

    /// Whether the tensor's parts are equally far apart, and a strided view of them can be read in their dtype.
    fn is_regular(&self, place: &Place) -> bool {
        let equal = |values: &[usize]| values.windows(2).all(|pair| pair[0] == pair[1]);
        equal(&self.sizes) && equal(&place.offsets) && self.sizes[0].is_multiple_of(place.width)
    }

    fn typed(&self, buffer: &Tensor, place: &Place) -> Result<Tensor, TchError> {
        if place.kind == self.kind { Ok(buffer.shallow_clone()) } else { buffer.f_view_dtype(place.kind) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use ferrotitan_mesh::{Degrees, Grid, Parts};
    use proptest::prelude::*;
    use tch::Device;

    use super::*;

    fn shape() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(1_usize..7, 1..4)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

        /// What all ranks pack of their own, laid one after the other, is what packing the whole gives; both give the
        /// tensors back.
        #[test]
        fn own_parts_and_the_whole_agree(
            shapes in prop::collection::vec((shape(), any::<prop::sample::Index>(), any::<bool>()), 1..5), ranks in 1_usize..6,
        ) {
            let degrees = Degrees { dp_shard: ranks, ..Degrees::default() };
            let tensors: Vec<_> = shapes.iter().enumerate().map(|(index, (shape, axis, wide))| {
                let layout = Layout::replicated(shape).shard(View::FSDP, axis.index(shape.len()), Parts::Even).unwrap();
                let numel: usize = shape.iter().product();
                let kind = if *wide { Kind::Double } else { Kind::BFloat16 };
                let values = Tensor::arange(numel as i64, (Kind::Double, Device::Cpu)) + index as f64 * 1000.0;
                let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
                (Extent::new(&layout, &Grid::new(degrees, 0).unwrap()).unwrap(), values.view(sizes.as_slice()).to_kind(kind))
            }).collect();
            let packing = Packing::new(tensors.iter().map(|(extent, tensor)| (extent, tensor.kind())), ranks);
            let buffer = |length: usize| Tensor::zeros([length as i64], (packing.kind(), Device::Cpu));
            let whole = buffer(packing.total());
            let stretches: Vec<Tensor> = packing.sizes().iter().map(|&size| buffer(size)).collect();
            for (index, (extent, tensor)) in tensors.iter().enumerate() {
                for (piece, mut place) in packing.pieces(&whole, index, tensor, extent).unwrap() {
                    place.copy_(&piece);
                }
                for (rank, stretch) in stretches.iter().enumerate() {
                    let part = extent.part(tensor, rank).unwrap();
                    packing.own(stretch, index, rank, extent).unwrap().copy_(&part);
                }
            }
            prop_assert_eq!(&Tensor::cat(&stretches, 0), &whole);
            for (index, (extent, tensor)) in tensors.iter().enumerate() {
                let again = tensor.zeros_like();
                for (mut piece, place) in packing.pieces(&whole, index, &again, extent).unwrap() {
                    piece.copy_(&place);
                }
                prop_assert_eq!(&again, tensor);
            }
        }
    }
}
