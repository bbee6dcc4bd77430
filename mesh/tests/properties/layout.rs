use ferrotitan_mesh::{Degrees, Dim, Error, Grid, Layout, Mesh as _, Parts, Split, View};
use proptest::prelude::*;

use crate::arbitrary::{degrees, dice, elements, indices, layout, shape};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn regions_are_what_splitting_lists_gives(mut dice in dice()) {
        let (shape, degrees) = (shape(&mut dice), degrees(&mut dice));
        let layout = layout(&mut dice, &shape, &degrees);
        layout.check(&degrees).unwrap();
        for grid in Grid::all(degrees).unwrap() {
            let region = layout.local_region(&grid);
            prop_assert_eq!(&layout.local_shape(&grid), &region.shape);
            for (axis, range) in region.ranges().enumerate() {
                prop_assert!(range.end <= shape[axis]);
                prop_assert_eq!(range.collect::<Vec<_>>(), indices(&layout, axis, |view| grid.index(view), &degrees));
            }
        }
    }

    #[test]
    fn each_element_has_one_owner_and_equally_many_holders(mut dice in dice()) {
        let (shape, degrees) = (shape(&mut dice), degrees(&mut dice));
        let layout = layout(&mut dice, &shape, &degrees);
        let numel = shape.iter().product();
        let (mut owners, mut holders) = (vec![0; numel], vec![0; numel]);
        for grid in Grid::all(degrees).unwrap().filter(|grid| layout.is_held(grid)) {
            for element in elements(&shape, &layout.local_region(&grid)) {
                holders[element] += 1;
                owners[element] += usize::from(layout.is_owner(&grid));
            }
        }
        prop_assert!(owners.iter().all(|&owners| owners == 1), "{owners:?}");
        let replicas = layout.replicas(&degrees) * layout.stages().len();
        prop_assert!(holders.iter().all(|&holders| holders == replicas), "{holders:?}, not {replicas}");
    }

    /// Without a word on stages, each stage has an owner for each element.
    #[test]
    fn a_stage_owns_its_own(mut dice in dice()) {
        let (shape, degrees) = (shape(&mut dice), degrees(&mut dice));
        let layout = layout(&mut dice, &shape, &degrees).held_by_stages(&[]);
        for stage in 0..degrees.pp {
            let mut owners = vec![0; shape.iter().product()];
            let ranks = Grid::all(degrees).unwrap().filter(|grid| grid.coordinate(Dim::Pp) == stage);
            for grid in ranks.filter(|grid| layout.is_owner(grid)) {
                elements(&shape, &layout.local_region(&grid)).into_iter().for_each(|element| owners[element] += 1);
            }
            prop_assert!(owners.iter().all(|&owners| owners == 1), "{owners:?}");
        }
    }

    #[test]
    fn a_layout_survives_its_fields(mut dice in dice()) {
        let (shape, degrees) = (shape(&mut dice), degrees(&mut dice));
        let layout = layout(&mut dice, &shape, &degrees);
        let partial = View::WORLD.without(View::PP).without(layout.split_view());
        let layout = layout.with_partial(partial).unwrap();
        let again = Layout::new(layout.shape(), layout.splits().to_vec(), layout.partial(), layout.stages());
        prop_assert_eq!(again.as_ref(), Ok(&layout));
        prop_assert_eq!(layout.reduced().partial(), View::NONE);
    }

    #[test]
    fn groups_are_never_split(heads in 1..20_usize, head_size in 1..4_usize, size in 1..20_usize) {
        let Ok(Parts::At(ranges)) = Parts::groups(heads, head_size, size) else {
            prop_assert!(heads < size && size % heads != 0);
            return Ok(());
        };
        prop_assert!(ranges.iter().all(|range| range.start % head_size == 0 && range.end % head_size == 0));
        let sizes = ranges.iter().map(|range| range.len() / head_size);
        prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
        prop_assert!(ranges.iter().is_sorted_by_key(|range| range.start));
        let layout = Layout::replicated(&[heads * head_size]).shard(View::TP, 0, Parts::At(ranges)).unwrap();
        let degrees = Degrees { tp: size, ..Degrees::default() };
        prop_assert_eq!(layout.replicas(&degrees), if heads < size { size / heads } else { 1 });
    }
}

#[test]
fn larger_parts_come_first() {
    let layout = Layout::replicated(&[5]).shard(View::TP, 0, Parts::Even).unwrap();
    let lengths = |tp| {
        let all = Grid::all(Degrees { tp, ..Degrees::default() }).unwrap();
        all.map(|grid| layout.local_shape(&grid)[0]).collect::<Vec<_>>()
    };
    assert_eq!(lengths(3), [2, 2, 1]);
    assert_eq!(lengths(7), [1, 1, 1, 1, 1, 0, 0]);
}

#[test]
fn what_is_no_layout_is_refused() {
    let whole = Layout::replicated(&[8, 4]);
    let at = |ranges: &[(usize, usize)]| Parts::At(ranges.iter().map(|&(start, end)| start..end).collect());
    let refused = |ranges: &[(usize, usize)]| match whole.clone().shard(View::TP, 0, at(ranges)) {
        Err(Error::BadParts { problem, .. }) => problem,
        other => panic!("accepted {ranges:?}: {other:?}"),
    };
    assert_eq!(refused(&[(0, 5), (4, 8)]), "4..8 overlaps another range in part, so make the two equal or disjoint");
    assert_eq!(refused(&[(0, 3), (4, 8)]), "nobody holds 3..4");
    assert_eq!(refused(&[(0, 3), (3, 7)]), "nobody holds 7..8");
    assert_eq!(refused(&[]), "nobody holds 0..8");
    assert_eq!(refused(&[(0, 4), (4, 9)]), "4..9 is not a range inside the axis");
    assert_eq!(refused(&[(0, 8), (8, 4)]), "8..4 is not a range inside the axis");
    assert_eq!(refused(&[(0, 4), (0, 4), (4, 8)]), "4..8 has 1 holders, so give every range equally many");

    let refused = |layout: Result<Layout, Error>| layout.unwrap_err();
    assert_eq!(
        refused(whole.clone().shard(View::TP, 2, Parts::Even)),
        Error::NoSuchAxis { axis: 2, shape: vec![8, 4] }
    );
    assert_eq!(refused(whole.clone().shard(View::WORLD, 0, Parts::Even)), Error::OverStages { view: View::WORLD });
    assert_eq!(refused(whole.clone().with_partial(View::PP)), Error::OverStages { view: View::PP });
    let sharded = whole.clone().shard(View::FSDP, 0, Parts::Even).unwrap();
    let twice = Error::ViewUsedTwice { view: View::CP, used: View::FSDP };
    assert_eq!(refused(sharded.clone().shard(View::CP, 1, Parts::Even)), twice);
    assert_eq!(refused(sharded.with_partial(View::CP)), twice);
    let partial = whole.clone().with_partial(View::CP).unwrap();
    assert_eq!(
        refused(partial.shard(View::FSDP, 0, Parts::Even)),
        Error::ViewUsedTwice { view: View::FSDP, used: View::CP }
    );
    let split = Split { view: View::TP, axis: 0, parts: Parts::Even };
    assert!(Layout::new(&[8], vec![split.clone(), split], View::NONE, &[]).is_err());
    assert_eq!(Parts::groups(4, 4, 6), Err(Error::Groups { groups: 4, size: 6 }));
    assert_eq!(Parts::groups(0, 4, 2), Err(Error::Groups { groups: 0, size: 2 }));
}

#[test]
fn another_mesh_is_noticed_and_survived() {
    let layout = Layout::replicated(&[8]).shard(View::TP, 0, Parts::groups(4, 2, 4).unwrap()).unwrap();
    let wider = Degrees { tp: 5, ..Degrees::default() };
    assert_eq!(layout.check(&wider), Err(Error::Mismatch { view: View::TP, needed: 4, found: 5 }));
    let outside = Grid::new(wider, 4).unwrap();
    assert_eq!(layout.local_shape(&outside), [0]);
    assert!(!layout.is_owner(&outside));
    let tied = Layout::replicated(&[8]).held_by_stages(&[0, 3]);
    assert_eq!(tied.check(&wider), Err(Error::Mismatch { view: View::PP, needed: 4, found: 1 }));
}
