//! Where a rank is, as plain data: whoever has a mesh says it once.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// A rank's place along one dimension of the mesh.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Coordinate {
    /// The dimension's name, such as `tp`.
    pub dimension: String,
    /// The place along it, from 0.
    pub index: usize,
    /// How many there are.
    pub size: usize,
}

/// One rank's place.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Place {
    /// The rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub world_size: usize,
    /// Its place along every dimension of more than one rank, outermost first. Ranks are counted along the last one first.
    pub coordinates: Vec<Coordinate>,
    /// The members of each of its groups of more than one rank, by the group's name.
    pub groups: BTreeMap<String, Vec<usize>>,
}

impl Place {
    /// The place of another rank of the same mesh, without its groups. `None` where there is no such rank, or where the
    /// sizes do not multiply to the number of ranks.
    pub fn of(&self, rank: usize) -> Option<Place> {
        let sizes = self.coordinates.iter().map(|coordinate| coordinate.size);
        let size = sizes.clone().try_fold(1_usize, usize::checked_mul)?;
        if size != self.world_size || rank >= size {
            return None;
        }
        let mut coordinates = self.coordinates.clone();
        let mut rest = rank;
        for coordinate in coordinates.iter_mut().rev() {
            coordinate.index = rest % coordinate.size;
            rest /= coordinate.size;
        }
        Some(Place { rank, world_size: size, coordinates, groups: BTreeMap::new() })
    }

    /// Where another rank of the same mesh is along a dimension. `None` where there is no such dimension or rank.
    pub fn index_of(&self, rank: usize, dimension: &str) -> Option<usize> {
        let at = self.coordinates.iter().position(|known| known.dimension == dimension)?;
        let inner = self.coordinates[at + 1..].iter().try_fold(1_usize, |all, c| all.checked_mul(c.size))?;
        let size = self.coordinates[at].size;
        (rank < self.world_size && inner > 0 && size > 0).then(|| rank / inner % size)
    }

    /// The place along a dimension, 0 where it has one rank alone.
    pub fn index(&self, dimension: &str) -> usize {
        self.coordinates.iter().find(|known| known.dimension == dimension).map_or(0, |known| known.index)
    }
}

/// `rank 3 (pp 1, tp 1)`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        for (number, Coordinate { dimension, index, .. }) in self.coordinates.iter().enumerate() {
            write!(f, "{}{dimension} {index}", if number == 0 { " (" } else { ", " })?;
        }
        f.write_str(if self.coordinates.is_empty() { "" } else { ")" })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn ranks_count_along_the_last_dimension_first() {
        let along = |dimension: &str, index, size| Coordinate { dimension: dimension.to_owned(), index, size };
        let place =
            Place { world_size: 6, coordinates: vec![along("pp", 0, 3), along("tp", 0, 2)], ..Place::default() };
        assert_eq!(place.of(3).unwrap().to_string(), "rank 3 (pp 1, tp 1)");
        assert_eq!(place.of(4).unwrap().index("pp"), 2);
        for (rank, dimension) in [(4, "pp"), (4, "tp"), (5, "tp"), (0, "pp")] {
            assert_eq!(place.index_of(rank, dimension), Some(place.of(rank).unwrap().index(dimension)));
        }
        assert_eq!((place.index_of(1, "cp"), place.index_of(6, "pp")), (None, None));
        assert_eq!(place.of(6), None);
        assert_eq!(Place { world_size: 7, ..place }.of(1), None);
        let alone = Place { world_size: 1, ..Place::default() };
        assert_eq!(alone.of(0).unwrap().to_string(), "rank 0");
    }
}
