//! Moving a tensor from one layout to another, perhaps on another mesh.

use crate::region::Runs;
use crate::{Degrees, Error, Grid, Layout, Mesh as _, Region, Result};

/// What has to move so that a tensor that lies as one layout on one mesh lies as another layout on another.
///
/// Each element comes from its one owner ([`Layout::is_owner`]), whoever else holds it.
#[derive(Clone, Debug)]
pub struct Plan {
    target: Layout,
    target_degrees: Degrees,
    /// The ranks of the source mesh that own something, and what.
    owners: Vec<(usize, Region)>,
}

impl Plan {
    /// The plan from `src` on a mesh of `src_degrees` to `dst` on one of `dst_degrees`.
    ///
    /// # Errors
    /// [`Error::Shapes`] when the tensors differ; [`Error::Partial`] when either layout's values are not final;
    /// [`Error::Mismatch`] when a layout was not made for its mesh; [`Error::UnknownStage`] when the source mesh has
    /// several stages and `src` does not say which of them hold the tensor; [`Error::NoMesh`].
    pub fn new(src: &Layout, src_degrees: &Degrees, dst: &Layout, dst_degrees: &Degrees) -> Result<Self> {
        if src.shape() != dst.shape() {
            let (source_shape, target_shape) = (src.shape().to_vec(), dst.shape().to_vec());
            return Err(Error::Shapes { source_shape, target_shape });
        }
        let view = src.partial().union(dst.partial());
        if view != crate::View::NONE {
            return Err(Error::Partial { view });
        }
        src.check(src_degrees)?;
        dst.check(dst_degrees)?;
        dst_degrees.validate()?;
        if src.stages().is_empty() && src_degrees.pp > 1 {
            return Err(Error::UnknownStage { stages: src_degrees.pp });
        }
        let owners = Grid::all(*src_degrees)?.filter(|grid| src.is_owner(grid));
        let owners = owners.map(|grid| (grid.rank(), src.local_region(&grid))).collect();
        Ok(Plan { target: dst.clone(), target_degrees: *dst_degrees, owners })
    }

    /// The box that a destination rank ends up with; `None` for a rank outside the mesh, or of a stage that does not
    /// hold the tensor.
    pub fn target(&self, rank: usize) -> Option<Region> {
        let grid = Grid::new(self.target_degrees, rank).ok()?;
        self.target.is_held(&grid).then(|| self.target.local_region(&grid))
    }

    /// What a destination rank receives, by source rank: together, each element of [`Plan::target`] once.
    pub fn transfers(&self, rank: usize) -> Vec<Transfer> {
        let Some(into) = self.target(rank) else { return Vec::new() };
        let transfer = |(from_rank, from): &(usize, Region)| {
            let region = from.intersect(&into)?;
            Some(Transfer { from_rank: *from_rank, region, from: from.clone(), into: into.clone() })
        };
        self.owners.iter().filter_map(transfer).collect()
    }
}

/// A box that one source rank gives to one destination rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The rank, in the source mesh, whose buffer holds it.
    pub from_rank: usize,
    /// The box that moves, in global coordinates.
    pub region: Region,
    /// All that the source rank holds: its buffer's shape.
    pub from: Region,
    /// All that the destination rank holds: its buffer's shape.
    pub into: Region,
}

impl Transfer {
    /// The copies that it consists of, contiguous in both buffers, in order, each as long as can be.
    pub fn runs(&self) -> impl Iterator<Item = Run> {
        TransferRuns {
            read: Side::new(self.region.runs_in(&self.from)),
            write: Side::new(self.region.runs_in(&self.into)),
        }
    }
}

/// Elements that are contiguous in the source's and in the destination's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The first element in the source rank's buffer.
    pub source: usize,
    /// The first element in the destination rank's buffer.
    pub target: usize,
    /// How many elements.
    pub length: usize,
}

/// Both buffers hold the box's elements in the same order, broken into runs at different places: cut at every break.
struct TransferRuns {
    read: Side,
    write: Side,
}

struct Side {
    runs: Runs,
    start: usize,
    left: usize,
}

impl Side {
    fn new(runs: Runs) -> Self {
        Side { runs, start: 0, left: 0 }
    }

    /// The number of contiguous elements ahead, going on to the next run where one has ended; 0 at the end.
    fn ahead(&mut self) -> usize {
        if self.left == 0 {
            (self.start, self.left) = self.runs.next().unwrap_or_default();
        }
        self.left
    }

    fn take(&mut self, length: usize) -> usize {
        let start = self.start;
        self.start += length;
        self.left -= length;
        start
    }
}

impl Iterator for TransferRuns {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let length = self.read.ahead().min(self.write.ahead());
        (length > 0).then(|| Run { source: self.read.take(length), target: self.write.take(length), length })
    }
}

/// Carries out a plan in memory, for one destination rank: `sources` holds every source rank's buffer, by rank.
///
/// # Errors
/// [`Error::Buffer`] when a source buffer is not as long as what its rank holds.
pub fn apply<T: Copy + Default>(plan: &Plan, sources: &[Vec<T>], rank: usize) -> Result<Vec<T>> {
    let mut target = vec![T::default(); plan.target(rank).map_or(0, |region| region.numel())];
    for transfer in plan.transfers(rank) {
        let source = sources.get(transfer.from_rank).map_or(&[][..], Vec::as_slice);
        let needed = transfer.from.numel();
        if source.len() != needed {
            return Err(Error::Buffer { needed, found: source.len() });
        }
        for Run { source: from, target: to, length } in transfer.runs() {
            target[to..to + length].copy_from_slice(&source[from..from + length]);
        }
    }
    Ok(target)
}
