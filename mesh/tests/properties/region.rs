use ferrotitan_mesh::Region;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::elements;

fn region() -> impl Strategy<Value = Region> {
    vec((0..5_usize, 0..5_usize), 3).prop_map(|axes| {
        let (offset, shape) = axes.into_iter().unzip();
        Region { offset, shape }
    })
}

/// The elements of `region` that lie in `outer`, as indices into the buffer of `outer`.
fn inside(region: &Region, outer: &Region) -> Vec<usize> {
    let global = elements(&[10, 10, 10], region);
    let held = elements(&[10, 10, 10], outer);
    global.iter().filter_map(|element| held.iter().position(|other| other == element)).collect()
}

proptest! {
    #[test]
    fn runs_are_the_elements_in_order_and_as_long_as_can_be(region in region(), outer in region()) {
        let runs: Vec<_> = region.runs_in(&outer).collect();
        let listed: Vec<_> = runs.iter().flat_map(|&(start, length)| start..start + length).collect();
        prop_assert_eq!(listed, inside(&region, &outer));
        prop_assert!(runs.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0));
        prop_assert!(runs.iter().all(|run| run.1 > 0));
        prop_assert_eq!(region.runs_in(&outer).len(), runs.len());
    }

    #[test]
    fn intersection_and_containment_are_those_of_sets(a in region(), b in region()) {
        let (of_a, of_b) = (elements(&[10, 10, 10], &a), elements(&[10, 10, 10], &b));
        let common: Vec<_> = of_a.iter().filter(|element| of_b.contains(element)).copied().collect();
        let found = a.intersect(&b);
        prop_assert_eq!(found.as_ref().map_or(vec![], |region| elements(&[10, 10, 10], region)), common.clone());
        prop_assert_eq!(found.is_none(), common.is_empty());
        prop_assert_eq!(b.contains(&a), common.len() == of_a.len());
        prop_assert_eq!(a.numel(), of_a.len());
        if let Some(found) = found {
            let relative = found.relative_to(&b).unwrap();
            prop_assert_eq!(elements(&b.shape, &relative), inside(&found, &b));
        }
    }
}

#[test]
fn other_numbers_of_axes_and_absurd_sizes_have_nothing_in_common() {
    let (scalar, vector) = (Region::whole(&[]), Region::whole(&[3]));
    assert_eq!((scalar.numel(), scalar.runs_in(&scalar).collect()), (1, vec![(0, 1)]));
    assert_eq!((scalar.intersect(&vector), scalar.runs_in(&vector).next()), (None, None));
    assert!(!vector.contains(&scalar) && vector.relative_to(&scalar).is_none());
    let far = Region { offset: vec![usize::MAX; 3], shape: vec![usize::MAX; 3] };
    assert_eq!((far.numel(), far.intersect(&far)), (usize::MAX, None));
    let huge = Region::whole(&[usize::MAX; 3]);
    assert_eq!(huge.intersect(&huge).as_ref(), Some(&huge));
    assert!(huge.runs_in(&huge).next().is_some());
    assert_eq!(Region::whole(&[usize::MAX, usize::MAX, 0]).numel(), 0);
}
