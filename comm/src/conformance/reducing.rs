//! Collectives that combine values: all-reduce and reduce-scatter.

use tch::{Kind, Tensor};

use super::case::{Case, same};
use super::moving::ranks_values;
use super::{Ranks, Verdict, on_worlds, told};
use crate::{Group, ReduceOp};

/// How many cases the check draws for each world size.
const CASES: u64 = 24;

pub(super) fn reductions(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        for seed in 0..CASES {
            let case = Case::draw(seed ^ 0x7265_6475, &Case::NUMBERS);
            let checked = check_all_reduce(group, &case).and_then(|()| check_reduce_scatter(group, &case));
            checked.map_err(|found| format!("{case:?}: {found}"))?;
        }
        // Larger than any block or threshold, and of an odd length.
        let case = Case { shape: vec![3, 100_003], axis: 1, ..Case::draw(1, &[Kind::Float]) };
        check_all_reduce(group, &Case { sizes: vec![100_003; 8], ..case })
    })
}

/// All-reduce to new memory and in place, by every operation.
///
/// # Errors
/// What was found instead.
pub fn check_all_reduce(group: &Group, case: &Case) -> Verdict {
    let shape = case.shape_with(case.axis, case.sizes[0]);
    let all = ranks_values(group, case, |_| shape.clone())?;
    for reduce in ReduceOp::ALL {
        let expected = dense(&all, reduce)?;
        let mut own = case.own(group, &shape)?;
        same(&group.all_reduce(&own, reduce).map_err(told)?, &expected)?;
        same(&own, &all[group.rank()]).map_err(|found| format!("the input changed: {found}"))?;
        group.all_reduce_(&mut own, reduce).map_err(told)?;
        same(&own, &expected).map_err(|found| format!("in place: {found}"))?;
    }
    Ok(())
}

/// Reduce-scatter, even and uneven, into new and given memory.
///
/// # Errors
/// What was found instead.
pub fn check_reduce_scatter(group: &Group, case: &Case) -> Verdict {
    let (axis, sizes, rank) = (case.axis, case.sizes(group.size()), group.rank());
    let part = |tensor: &Tensor, sizes: &[usize]| {
        let offset: usize = sizes[..rank].iter().sum();
        tensor.narrow(axis as i64, offset as i64, sizes[rank] as i64)
    };
    let shape = case.shape_with(axis, sizes.iter().sum());
    let all = ranks_values(group, case, |_| shape.clone())?;
    let expected = part(&dense(&all, ReduceOp::Sum)?, sizes);
    let own = case.own(group, &shape)?;
    same(&group.reduce_scatter_uneven(&own, axis, sizes).map_err(told)?, &expected)?;

    let mut output = expected.contiguous().zeros_like().to_device(group.device());
    group.reduce_scatter_into(&mut output, &own, axis, sizes).map_err(told)?;
    same(&output, &expected)?;
    same(&own, &all[rank]).map_err(|found| format!("the input changed: {found}"))?;

    let even = vec![sizes[0]; group.size()];
    let shape = case.shape_with(axis, even.iter().sum());
    let all = ranks_values(group, case, |_| shape.clone())?;
    let own = case.own(group, &shape)?;
    let expected = part(&dense(&all, ReduceOp::Sum)?, &even);
    same(&group.reduce_scatter(&own, axis).map_err(told)?, &expected)
}

/// The combination in `f64`, in rank order.
fn dense(all: &[Tensor], reduce: ReduceOp) -> Result<Tensor, String> {
    let kind = all[0].kind();
    let mut total = all[0].f_to_kind(Kind::Double).map_err(told)?;
    for tensor in &all[1..] {
        let tensor = tensor.f_to_kind(Kind::Double).map_err(told)?;
        let combined = match reduce {
            ReduceOp::Sum => total.f_add(&tensor),
            ReduceOp::Product => total.f_mul(&tensor),
            ReduceOp::Min => total.f_minimum(&tensor),
            ReduceOp::Max => total.f_maximum(&tensor),
        };
        total = combined.map_err(told)?;
    }
    total.f_to_kind(kind).map_err(told)
}

pub(super) fn half_precision(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        for (kind, large) in [(Kind::BFloat16, 256.0), (Kind::Half, 2048.0)] {
            // Between `large` and its double, a step of the kind is 2: adding ones one by one in it changes nothing.
            let value = if group.rank() == 0 { large } else { 1.0 };
            let own = Tensor::full([8 * group.size() as i64], value, (kind, group.device()));
            let sum = Tensor::from_slice(&[large + (group.size() - 1) as f64]).to_kind(kind);
            let expected = sum.expand([8], false);
            same(&group.reduce_scatter(&own, 0).map_err(told)?, &expected)?;
            same(&group.all_reduce(&own, ReduceOp::Sum).map_err(told)?.narrow(0, 0, 8), &expected)?;
        }
        Ok(())
    })
}
