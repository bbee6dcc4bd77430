//! What can be wrong with a mesh, a layout, or a plan.

use crate::View;

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A mesh, layout, plan or distribution that cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No mesh dimension, and no set of them, has this name.
    #[error("no mesh dimension is called \"{name}\": use pp, dp_replicate, dp_shard, cp or tp, or several joined by +")]
    UnknownName {
        /// The name as given.
        name: String,
    },
    /// A degree of zero, or degrees whose product no machine can hold.
    #[error("{degrees} is not a mesh: every degree must be at least 1 and their product must fit in 64 bits")]
    NoMesh {
        /// The degrees, as a product.
        degrees: String,
    },
    /// The degrees do not multiply to the number of ranks.
    #[error("{product} = {needed} ranks, but the world has {world_size}: {remedy}")]
    WorldSize {
        /// The degrees, as a product.
        product: String,
        /// What the product comes to.
        needed: usize,
        /// How many ranks there are.
        world_size: usize,
        /// What would fit.
        remedy: String,
    },
    /// A rank outside the mesh.
    #[error("rank {rank} is outside a mesh of {world_size} ranks: ranks count from 0 to one less than the world size")]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// How many ranks the mesh has.
        world_size: usize,
    },
    /// A split along an axis that the tensor does not have.
    #[error("axis {axis} of a tensor of shape {shape:?} cannot be split: it has {} axes", shape.len())]
    NoSuchAxis {
        /// The axis asked for.
        axis: usize,
        /// The tensor's global shape.
        shape: Vec<usize>,
    },
    /// A mesh dimension with two roles in one layout.
    #[error("{view} is already used by this layout ({used}): a dimension splits, or sums, a tensor once")]
    ViewUsedTwice {
        /// The view that was to be added.
        view: View,
        /// The dimensions that have a role already.
        used: View,
    },
    /// A split, or a partial sum, over pipeline stages.
    #[error("{view} contains pp: a tensor lies whole on its pipeline stages, so name them with held_by_stages")]
    OverStages {
        /// The offending view.
        view: View,
    },
    /// Explicit ranges that do not partition the axis.
    #[error("the parts {ranges} do not partition an axis of {length} elements: {problem}")]
    BadParts {
        /// The ranges as given.
        ranges: String,
        /// The axis's length in elements.
        length: usize,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// Groups of elements that cannot be dealt out without splitting one.
    #[error(
        "{groups} heads or groups cannot be dealt to {size} ranks: use at most {groups} ranks, or a multiple of {groups}"
    )]
    Groups {
        /// How many groups there are.
        groups: usize,
        /// How many ranks share them.
        size: usize,
    },
    /// A layout on a mesh that it was not made for.
    #[error("the layout needs {needed} along {view}, but the mesh has {found}: make the layout for this mesh")]
    Mismatch {
        /// The view in question.
        view: View,
        /// How many ranks the layout expects (for stages: more than this index).
        needed: usize,
        /// How many the mesh has.
        found: usize,
    },
    /// A resharding between different tensors.
    #[error(
        "a tensor of shape {source_shape:?} cannot be resharded into shape {target_shape:?}: the shapes must agree"
    )]
    Shapes {
        /// The source's global shape.
        source_shape: Vec<usize>,
        /// The destination's global shape.
        target_shape: Vec<usize>,
    },
    /// A resharding of values that are not summed yet.
    #[error("values that are still a sum over {view} cannot be resharded: reduce them over {view} first")]
    Partial {
        /// The dimensions over which the sum is outstanding.
        view: View,
    },
    /// A source on a mesh with pipeline stages that does not say which stage holds it.
    #[error("the source mesh has {stages} pipeline stages: say which of them hold the tensor, with held_by_stages")]
    UnknownStage {
        /// The number of stages.
        stages: usize,
    },
    /// A buffer whose length is not that of the region it stands for.
    #[error("a buffer of {found} elements was given for a region of {needed}: allocate {needed}")]
    Buffer {
        /// The region's number of elements.
        needed: usize,
        /// The buffer's length.
        found: usize,
    },
    /// Parameters that describe no distribution.
    #[error("{distribution} is not a distribution: {problem}")]
    Distribution {
        /// The distribution as given.
        distribution: String,
        /// What is wrong and what would be right.
        problem: String,
    },
}
