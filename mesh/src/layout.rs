//! How a global tensor lies on a mesh.

use crate::region::numel;
use crate::{Coordinates, Degrees, Dim, Error, Mesh, Parts, Region, Result, View};

/// One axis of a tensor divided among the ranks of a view.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Split {
    /// The ranks among which the axis is divided.
    pub view: View,
    /// The tensor axis.
    pub axis: usize,
    /// Who gets what of it.
    pub parts: Parts,
}

/// How a global tensor lies on a mesh: which box of it each rank holds, and whether the values are final.
///
/// Splits apply in order: a later one on the same axis divides what the earlier one left (tensor parallel first, then
/// fully sharded). Along the dimensions that no split names the tensor is replicated, or, along those of
/// [`Layout::partial`], is a sum whose terms lie on the ranks.
///
/// A tensor lies on pipeline stages as a whole. Unless [`Layout::held_by_stages`] says which, it is that of whoever asks:
/// a parameter exists only on the ranks of its stage.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    shape: Vec<usize>,
    splits: Vec<Split>,
    partial: View,
    stages: Vec<usize>,
}

impl Layout {
    /// A tensor of this global shape, whole on every rank.
    pub fn replicated(shape: &[usize]) -> Self {
        Layout { shape: shape.to_vec(), splits: Vec::new(), partial: View::NONE, stages: Vec::new() }
    }

    /// A layout from its fields, as its accessors give them.
    ///
    /// # Errors
    /// As [`Layout::shard`] and [`Layout::with_partial`].
    pub fn new(shape: &[usize], splits: Vec<Split>, partial: View, stages: &[usize]) -> Result<Self> {
        let whole = Layout::replicated(shape).held_by_stages(stages);
        let sharded =
            splits.into_iter().try_fold(whole, |layout, split| layout.shard(split.view, split.axis, split.parts))?;
        sharded.with_partial(partial)
    }

    /// The same layout with `axis` also divided among the ranks of `view`.
    ///
    /// # Errors
    /// [`Error::NoSuchAxis`]; [`Error::ViewUsedTwice`] when a dimension of `view` has a role already;
    /// [`Error::OverStages`] when `view` contains `pp`; [`Error::BadParts`] when explicit ranges overlap in part, leave
    /// elements out, or have unequally many replicas.
    pub fn shard(mut self, view: View, axis: usize, parts: Parts) -> Result<Self> {
        self.vet(view)?;
        let Some(&length) = self.shape.get(axis) else {
            return Err(Error::NoSuchAxis { axis, shape: self.shape });
        };
        parts.validate(length)?;
        self.splits.push(Split { view, axis, parts });
        Ok(self)
    }

    /// The same layout with values that are a sum still to be taken over `view`.
    ///
    /// # Errors
    /// [`Error::ViewUsedTwice`] when a dimension of `view` splits the tensor; [`Error::OverStages`].
    pub fn with_partial(mut self, view: View) -> Result<Self> {
        self.partial = View::NONE;
        self.vet(view)?;
        self.partial = view;
        Ok(self)
    }

    /// The same layout once the sum is taken: what was partial is replicated.
    #[must_use]
    pub fn reduced(mut self) -> Self {
        self.partial = View::NONE;
        self
    }

    /// The same layout on these pipeline stages (an embedding tied to the head lies on two), the first of which owns it.
    /// No stage means that of whoever asks.
    #[must_use]
    pub fn held_by_stages(mut self, stages: &[usize]) -> Self {
        self.stages = stages.to_vec();
        self
    }

    /// The global shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The splits, in the order in which they apply.
    pub fn splits(&self) -> &[Split] {
        &self.splits
    }

    /// The dimensions over which the values are a sum still to be taken; [`View::NONE`] when they are final.
    pub fn partial(&self) -> View {
        self.partial
    }

    /// The pipeline stages that hold it, the owner first; empty when nobody said.
    pub fn stages(&self) -> &[usize] {
        &self.stages
    }

    /// The dimensions that divide it.
    pub fn split_view(&self) -> View {
        self.splits.iter().fold(View::NONE, |view, split| view.union(split.view))
    }

    /// Refuses a mesh for which the layout was not made: another number of ranks than explicit ranges, or too few
    /// stages. On such a mesh the other functions still answer, but the regions need not cover the tensor.
    ///
    /// # Errors
    /// [`Error::Mismatch`].
    pub fn check(&self, degrees: &Degrees) -> Result<()> {
        for Split { view, parts, .. } in &self.splits {
            let found = degrees.size(*view);
            if let Parts::At(ranges) = parts
                && ranges.len() != found
            {
                return Err(Error::Mismatch { view: *view, needed: ranges.len(), found });
            }
        }
        let found = degrees.get(Dim::Pp);
        match self.stages.iter().find(|stage| **stage >= found) {
            Some(stage) => Err(Error::Mismatch { view: View::PP, needed: stage.saturating_add(1), found }),
            None => Ok(()),
        }
    }

    /// The box of the global tensor that the rank at `coordinates` holds, if its stage holds the tensor at all. It may
    /// have no element.
    pub fn region(&self, degrees: &Degrees, coordinates: &Coordinates) -> Region {
        let mut region = Region::whole(&self.shape);
        for Split { view, axis, parts } in &self.splits {
            let left = region.offset[*axis]..region.offset[*axis] + region.shape[*axis];
            let kept = parts.keep(left, coordinates.index(*view, degrees), degrees.size(*view));
            (region.offset[*axis], region.shape[*axis]) = (kept.start, kept.len());
        }
        region
    }

    /// The box that this rank holds.
    pub fn local_region(&self, mesh: &dyn Mesh) -> Region {
        self.region(&mesh.degrees(), &mesh.coordinates())
    }

    /// The shape of what this rank holds.
    pub fn local_shape(&self, mesh: &dyn Mesh) -> Vec<usize> {
        self.local_region(mesh).shape
    }

    /// Whether this rank's stage holds the tensor.
    pub fn is_held(&self, mesh: &dyn Mesh) -> bool {
        self.stages.is_empty() || self.stages.contains(&mesh.coordinate(Dim::Pp))
    }

    /// Whether this rank answers for the elements it holds: of all ranks that hold an element, exactly one does (of all
    /// ranks of one stage, if nobody said which stages hold the tensor). A rank without elements owns nothing.
    ///
    /// Of partial values, the owner is whoever would own the sum.
    pub fn is_owner(&self, mesh: &dyn Mesh) -> bool {
        let (degrees, here) = (mesh.degrees(), mesh.coordinates());
        let first_stage = self.stages.first().is_none_or(|stage| here.get(Dim::Pp) == *stage);
        let first_copy = here.index(self.copied_view(), &degrees) == 0;
        let first_part = self.splits.iter().all(|split| split.parts.is_first(here.index(split.view, &degrees)));
        first_stage && first_copy && first_part && numel(&self.region(&degrees, &here).shape) > 0
    }

    /// How many ranks of a stage hold each element.
    pub fn replicas(&self, degrees: &Degrees) -> usize {
        let copies = degrees.size(self.copied_view());
        self.splits.iter().fold(copies, |replicas, split| replicas.saturating_mul(split.parts.replicas()))
    }

    /// The dimensions, other than the stages', that do not divide it.
    fn copied_view(&self) -> View {
        View::WORLD.without(View::PP).without(self.split_view())
    }

    /// Refuses a view whose dimensions have a role already, or cannot have one.
    fn vet(&self, view: View) -> Result<()> {
        let used = self.split_view().union(self.partial);
        if view.contains(Dim::Pp) {
            return Err(Error::OverStages { view });
        }
        if view.overlaps(used) {
            return Err(Error::ViewUsedTwice { view, used });
        }
        Ok(())
    }
}
