use std::collections::BTreeSet;

use ferrotitan_mesh::{Degrees, Dim, Error, Grid, Mesh as _, View};
use proptest::prelude::*;

use crate::arbitrary::{degrees, dice};

fn views() -> impl Iterator<Item = View> {
    (0..32).map(|bits| Dim::ALL.into_iter().filter(|dim| bits >> *dim as u8 & 1 == 1).collect())
}

proptest! {
    /// The picture of the mesh: a nested loop, pipeline outermost.
    #[test]
    fn ranks_count_row_major(mut dice in dice()) {
        let degrees = degrees(&mut dice);
        let mut rank = 0;
        for pp in 0..degrees.pp {
            for dp_replicate in 0..degrees.dp_replicate {
                for dp_shard in 0..degrees.dp_shard {
                    for cp in 0..degrees.cp {
                        for tp in 0..degrees.tp {
                            let grid = Grid::new(degrees, rank).unwrap();
                            let here = [pp, dp_replicate, dp_shard, cp, tp];
                            prop_assert_eq!(Dim::ALL.map(|dim| grid.coordinate(dim)), here);
                            prop_assert_eq!(degrees.rank(&grid.coordinates()), rank);
                            prop_assert_eq!(grid.index(View::FSDP), dp_shard * degrees.cp + cp);
                            prop_assert_eq!(grid.index(View::BATCH), dp_replicate * degrees.dp_shard + dp_shard);
                            rank += 1;
                        }
                    }
                }
            }
        }
        prop_assert_eq!(rank, degrees.world_size());
    }

    #[test]
    fn the_groups_of_a_view_partition_the_world(mut dice in dice()) {
        let degrees = degrees(&mut dice);
        for view in views() {
            let mut groups = BTreeSet::new();
            for grid in Grid::all(degrees).unwrap() {
                let ranks = grid.ranks(view);
                prop_assert_eq!(ranks.len(), grid.size(view));
                prop_assert_eq!(ranks[grid.index(view)], grid.rank());
                prop_assert!(ranks.is_sorted());
                for rank in &ranks {
                    let (here, there) = (grid.coordinates(), degrees.coordinates(*rank));
                    prop_assert!(Dim::ALL.iter().all(|&dim| view.contains(dim) || here.get(dim) == there.get(dim)));
                }
                groups.insert(ranks);
            }
            let members: Vec<_> = groups.iter().flatten().collect();
            prop_assert_eq!(members.len(), degrees.world_size());
            prop_assert_eq!(members.into_iter().collect::<BTreeSet<_>>().len(), degrees.world_size());
        }
    }

    #[test]
    fn what_is_left_over_shards(mut dice in dice()) {
        let degrees = degrees(&mut dice);
        let world_size = degrees.world_size();
        prop_assert_eq!(degrees.with(Dim::DpShard, 77).fit(None, world_size).unwrap(), degrees);
        prop_assert_eq!(degrees.fit(Some(degrees.dp_shard), world_size).unwrap(), degrees);
        let wrong = degrees.fit(Some(degrees.dp_shard + 1), world_size);
        let remedied = matches!(wrong, Err(Error::WorldSize { remedy, .. })
            if remedy.starts_with(&format!("set dp_shard to {},", degrees.dp_shard)));
        prop_assert!(remedied);
    }
}

#[test]
fn names_read_back() {
    for view in views() {
        assert_eq!(view.name().parse::<View>().unwrap(), view);
        assert_eq!(view.dims().collect::<View>(), view);
    }
    assert_eq!(View::FSDP.name(), "fsdp");
    assert_eq!(View::PP.union(View::TP).to_string(), "pp+tp");
    assert_eq!(format!("{:?}", View::CP), "View(cp)");
    for dim in Dim::ALL {
        assert_eq!(dim.name().parse::<Dim>().unwrap(), dim);
        assert_eq!(View::from(dim).name(), dim.name());
    }
    assert_eq!("ep".parse::<View>().unwrap_err(), Error::UnknownName { name: "ep".to_owned() });
    assert!("tp+".parse::<View>().is_err());
}

#[test]
fn coordinates_show_what_matters() {
    let degrees = Degrees { pp: 2, tp: 2, ..Degrees::default() };
    assert_eq!(Grid::new(degrees, 2).unwrap().coordinates().to_string(), "pp 1, tp 0");
    assert_eq!(Grid::single().coordinates().to_string(), "single rank");
    assert_eq!(Grid::single().ranks(View::TP), [0]);
}

#[test]
fn wrong_degrees_are_refused_with_a_remedy() {
    let degrees = Degrees { pp: 3, tp: 2, ..Degrees::default() };
    assert_eq!(
        degrees.fit(None, 8).unwrap_err().to_string(),
        "pp 3 * dp_replicate 1 * dp_shard 1 * cp 1 * tp 2 = 6 ranks, but the world has 8: the product of the degrees \
         besides dp_shard, 6, must divide the world size"
    );
    assert_eq!(
        degrees.fit(Some(3), 12).unwrap_err().to_string(),
        "pp 3 * dp_replicate 1 * dp_shard 3 * cp 1 * tp 2 = 18 ranks, but the world has 12: set dp_shard to 2, or start \
         18 ranks"
    );
    assert!(matches!(degrees.fit(Some(0), 6), Err(Error::NoMesh { .. })));
    assert!(matches!(degrees.fit(None, 0), Err(Error::WorldSize { .. })));
    let huge = Degrees { cp: usize::MAX, tp: 2, ..Degrees::default() };
    assert!(matches!(huge.fit(None, 8), Err(Error::NoMesh { .. })));
    assert_eq!(huge.world_size(), usize::MAX);
    assert_eq!(Grid::new(degrees, 6), Err(Error::NoSuchRank { rank: 6, world_size: 6 }));
    let zero = Degrees { tp: 0, ..degrees };
    assert!(Grid::new(zero, 0).is_err());
    assert_eq!((zero.world_size(), zero.coordinates(4).get(Dim::Pp)), (3, 1));
}
