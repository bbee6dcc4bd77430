//! A mesh: ranks arranged in a grid, and its slices.
//!
//! Everything follows from one rule: ranks count row-major through the dimensions, pipeline outermost, tensor parallel
//! innermost. All functions are total: a dimension of size 1 is a dimension like any other.

use std::fmt;

use crate::{Dim, Error, Result, View};

/// How many ranks a mesh has along each dimension. Each counts as at least 1; [`Degrees::validate`] refuses a zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Degrees {
    /// Pipeline stages.
    pub pp: usize,
    /// Replicas of the sharded model.
    pub dp_replicate: usize,
    /// Ranks that shard the parameters and read different data.
    pub dp_shard: usize,
    /// Ranks that share a sequence.
    pub cp: usize,
    /// Ranks that share a projection.
    pub tp: usize,
}

impl Default for Degrees {
    fn default() -> Self {
        Degrees { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 1 }
    }
}

impl Degrees {
    /// The size of one dimension, at least 1.
    pub fn get(&self, dim: Dim) -> usize {
        self.raw(dim).max(1)
    }

    /// The same degrees with `n` along `dim`.
    #[must_use]
    pub fn with(mut self, dim: Dim, n: usize) -> Self {
        match dim {
            Dim::Pp => self.pp = n,
            Dim::DpReplicate => self.dp_replicate = n,
            Dim::DpShard => self.dp_shard = n,
            Dim::Cp => self.cp = n,
            Dim::Tp => self.tp = n,
        }
        self
    }

    /// The number of ranks of the whole mesh.
    pub fn world_size(&self) -> usize {
        self.size(View::WORLD)
    }

    /// The number of ranks in a group of `view`.
    pub fn size(&self, view: View) -> usize {
        view.dims().fold(1, |size, dim| size.saturating_mul(self.get(dim)))
    }

    /// Where in the grid a rank stands.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        Coordinates::default().at(View::WORLD, rank, self)
    }

    /// Which rank stands there: the inverse of [`Degrees::coordinates`].
    pub fn rank(&self, coordinates: &Coordinates) -> usize {
        coordinates.index(View::WORLD, self)
    }

    /// Refuses a degree of zero and a product that overflows.
    ///
    /// # Errors
    /// [`Error::NoMesh`].
    pub fn validate(&self) -> Result<()> {
        let product = Dim::ALL.into_iter().try_fold(1_usize, |product, dim| product.checked_mul(self.raw(dim)));
        match product {
            Some(1..) => Ok(()),
            _ => Err(Error::NoMesh { degrees: self.to_string() }),
        }
    }

    /// The degrees of a mesh of `world_size` ranks. With `dp_shard` absent, that dimension takes the ranks that the
    /// others leave over, and `self.dp_shard` is not looked at.
    ///
    /// # Errors
    /// [`Error::NoMesh`] for a zero; [`Error::WorldSize`] when the product is not the world size, saying what would fit.
    pub fn fit(self, dp_shard: Option<usize>, world_size: usize) -> Result<Self> {
        let fixed = self.with(Dim::DpShard, 1);
        fixed.validate()?;
        let others = fixed.world_size();
        let fits = world_size > 0 && world_size.is_multiple_of(others);
        let degrees = fixed.with(Dim::DpShard, dp_shard.unwrap_or(if fits { world_size / others } else { 1 }));
        degrees.validate()?;
        if degrees.world_size() == world_size {
            return Ok(degrees);
        }
        let remedy = match fits {
            true => format!("set dp_shard to {}, or start {} ranks", world_size / others, degrees.world_size()),
            false => format!("the product of the degrees besides dp_shard, {others}, must divide the world size"),
        };
        Err(Error::WorldSize { product: degrees.to_string(), needed: degrees.world_size(), world_size, remedy })
    }

    fn raw(&self, dim: Dim) -> usize {
        match dim {
            Dim::Pp => self.pp,
            Dim::DpReplicate => self.dp_replicate,
            Dim::DpShard => self.dp_shard,
            Dim::Cp => self.cp,
            Dim::Tp => self.tp,
        }
    }
}

/// As a product: `pp 2 * dp_replicate 1 * dp_shard 4 * cp 1 * tp 2`.
impl fmt::Display for Degrees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let factors = Dim::ALL.map(|dim| format!("{dim} {}", self.raw(dim)));
        f.pad(&factors.join(" * "))
    }
}

/// Where in a mesh a rank stands: one index per dimension.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Coordinates {
    along: [usize; 5],
    /// The dimensions larger than 1, which are worth showing.
    shown: View,
}

impl Coordinates {
    /// The index along one dimension.
    pub fn get(&self, dim: Dim) -> usize {
        self.along[dim as usize]
    }

    /// The index in the group of `view`, row-major.
    pub fn index(&self, view: View, degrees: &Degrees) -> usize {
        view.dims().fold(0, |index, dim| index * degrees.get(dim) + self.get(dim))
    }

    /// The coordinates of the member `index` of the group of `view` that this place belongs to: only the indices along
    /// `view` change. An index past the group's end wraps around.
    #[must_use]
    pub fn at(mut self, view: View, mut index: usize, degrees: &Degrees) -> Self {
        for dim in view.dims().rev() {
            self.along[dim as usize] = index % degrees.get(dim);
            index /= degrees.get(dim);
        }
        self.shown = Dim::ALL.into_iter().filter(|dim| degrees.get(*dim) > 1).collect();
        self
    }
}

/// The dimensions larger than 1: `pp 1, tp 0`; `single rank` when there is none.
impl fmt::Display for Coordinates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> = self.shown.dims().map(|dim| format!("{dim} {}", self.get(dim))).collect();
        f.pad(&if shown.is_empty() { "single rank".to_owned() } else { shown.join(", ") })
    }
}

/// One rank's view of a mesh. An implementor says the degrees and its rank; the rest is arithmetic.
pub trait Mesh {
    /// How many ranks there are along each dimension.
    fn degrees(&self) -> Degrees;

    /// This rank, from 0 to one less than the world size.
    fn rank(&self) -> usize;

    /// The number of ranks of the whole mesh.
    fn world_size(&self) -> usize {
        self.degrees().world_size()
    }

    /// Where this rank stands.
    fn coordinates(&self) -> Coordinates {
        self.degrees().coordinates(self.rank())
    }

    /// This rank's index along `dim`.
    fn coordinate(&self, dim: Dim) -> usize {
        self.coordinates().get(dim)
    }

    /// The number of ranks in this rank's group of `view`.
    fn size(&self, view: View) -> usize {
        self.degrees().size(view)
    }

    /// This rank's index in its group of `view`.
    fn index(&self, view: View) -> usize {
        self.coordinates().index(view, &self.degrees())
    }

    /// The global ranks of this rank's group of `view`, in index order.
    fn ranks(&self, view: View) -> Vec<usize> {
        let (degrees, here) = (self.degrees(), self.coordinates());
        (0..degrees.size(view)).map(|index| degrees.rank(&here.at(view, index, &degrees))).collect()
    }
}

/// A mesh that is nothing but arithmetic: no communication.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Grid {
    degrees: Degrees,
    rank: usize,
}

impl Grid {
    /// The place of `rank` in a mesh of these degrees.
    ///
    /// # Errors
    /// [`Error::NoMesh`] for bad degrees, [`Error::NoSuchRank`] for a rank outside them.
    pub fn new(degrees: Degrees, rank: usize) -> Result<Self> {
        degrees.validate()?;
        let world_size = degrees.world_size();
        if rank >= world_size {
            return Err(Error::NoSuchRank { rank, world_size });
        }
        Ok(Grid { degrees, rank })
    }

    /// The mesh of one rank.
    pub fn single() -> Self {
        Grid { degrees: Degrees::default(), rank: 0 }
    }

    /// Every rank of a mesh of these degrees, in order.
    ///
    /// # Errors
    /// [`Error::NoMesh`] for bad degrees.
    pub fn all(degrees: Degrees) -> Result<impl Iterator<Item = Grid> + Clone> {
        degrees.validate()?;
        Ok((0..degrees.world_size()).map(move |rank| Grid { degrees, rank }))
    }
}

impl Mesh for Grid {
    fn degrees(&self) -> Degrees {
        self.degrees
    }

    fn rank(&self) -> usize {
        self.rank
    }
}
