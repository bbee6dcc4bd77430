use ferrotitan_mesh::reshard::{Plan, apply};
use ferrotitan_mesh::{Degrees, Error, Grid, Layout, Mesh as _, Parts, View};
use proptest::prelude::*;

use crate::arbitrary::{degrees, dice, elements, layout, shape};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_layout_becomes_any_other(mut dice in dice()) {
        let shape = shape(&mut dice);
        let (from, to) = (degrees(&mut dice), degrees(&mut dice));
        let (src, dst) = (layout(&mut dice, &shape, &from), layout(&mut dice, &shape, &to));
        // The value of an element is its global index. Ranks that do not own theirs hold junk, which must not be read.
        let source = |grid: Grid| {
            let elements = elements(&shape, &src.local_region(&grid));
            if src.is_owner(&grid) { elements } else { vec![usize::MAX; elements.len()] }
        };
        let sources: Vec<_> = Grid::all(from).unwrap().map(source).collect();
        let plan = Plan::new(&src, &from, &dst, &to).unwrap();
        for grid in Grid::all(to).unwrap() {
            let rank = grid.rank();
            let wanted = if dst.is_held(&grid) { elements(&shape, &dst.local_region(&grid)) } else { vec![] };
            prop_assert_eq!(apply(&plan, &sources, rank).unwrap(), &wanted[..]);
            let transfers = plan.transfers(rank);
            let mut moved: Vec<_> =
                transfers.iter().flat_map(|transfer| elements(&shape, &transfer.region)).collect();
            moved.sort_unstable();
            prop_assert_eq!(moved, wanted);
            for transfer in transfers {
                let runs: Vec<_> = transfer.runs().collect();
                prop_assert_eq!(runs.iter().map(|run| run.length).sum::<usize>(), transfer.region.numel());
                for pair in runs.windows(2) {
                    let joined = |from, to| from + pair[0].length == to;
                    prop_assert!(!(joined(pair[0].source, pair[1].source) && joined(pair[0].target, pair[1].target)));
                }
            }
        }
        prop_assert!(plan.transfers(to.world_size()).is_empty());
    }
}

#[test]
fn what_cannot_be_resharded_is_refused() {
    let one = Degrees::default();
    let tensor = Layout::replicated(&[8]);
    let error = |src: &Layout, from: Degrees, dst: &Layout, to: Degrees| Plan::new(src, &from, dst, &to).unwrap_err();
    assert!(matches!(error(&tensor, one, &Layout::replicated(&[4, 2]), one), Error::Shapes { .. }));
    let partial = tensor.clone().with_partial(View::TP).unwrap();
    assert_eq!(error(&partial, one, &tensor, one), Error::Partial { view: View::TP });
    assert_eq!(error(&tensor, one, &partial, one), Error::Partial { view: View::TP });
    let heads = tensor.clone().shard(View::TP, 0, Parts::groups(2, 4, 2).unwrap()).unwrap();
    assert_eq!(error(&heads, one, &tensor, one), Error::Mismatch { view: View::TP, needed: 2, found: 1 });
    assert_eq!(error(&tensor, one, &heads, one), Error::Mismatch { view: View::TP, needed: 2, found: 1 });
    let stages = Degrees { pp: 2, ..one };
    assert_eq!(error(&tensor, stages, &tensor, one), Error::UnknownStage { stages: 2 });
    assert!(matches!(error(&tensor, one, &tensor, Degrees { tp: 0, ..one }), Error::NoMesh { .. }));
    let plan = Plan::new(&tensor, &one, &tensor, &stages).unwrap();
    assert_eq!(apply(&plan, &[vec![0.0; 7]], 0), Err(Error::Buffer { needed: 8, found: 7 }));
    assert_eq!(apply::<f64>(&plan, &[], 1), Err(Error::Buffer { needed: 8, found: 0 }));
}
