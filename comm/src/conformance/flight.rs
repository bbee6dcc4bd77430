//! Collectives under way: several at once, waited for in any order, dropped.

use tch::{Kind, Tensor};

use super::case::{Case, same};
use super::moving::{number, own_draw, ranks_values};
use super::{Ranks, Verdict, ensure, on_worlds, told};
use crate::{Group, Op, Pending, ReduceOp};

pub(super) fn any_order(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        for seed in 0..6 {
            let started = (0..8).map(|i| start(group, &Case::draw(seed * 100 + i, &Case::NUMBERS), i));
            let mut started: Vec<_> = started.collect::<Result<Vec<_>, _>>()?.into_iter().map(Some).collect();
            // Each rank waits in an order of its own.
            for i in own_draw(group, seed).order(started.len()) {
                let Some((pending, expected)) = started[i].take() else { continue };
                same(&pending.wait().map_err(told)?, &expected).map_err(|found| format!("number {i}: {found}"))?;
            }
        }
        Ok(())
    })
}

/// Starts the collective of a number; gives what it should come to.
fn start(group: &Group, case: &Case, number: u64) -> Result<(Pending<Tensor>, Tensor), String> {
    let shape = case.shape_with(case.axis, case.sizes[0] * group.size());
    let own = case.own(group, &shape)?;
    let all = ranks_values(group, case, |_| shape.clone())?;
    let part =
        |tensor: &Tensor| tensor.narrow(case.axis as i64, (group.rank() * case.sizes[0]) as i64, case.sizes[0] as i64);
    let sum = || all[1..].iter().fold(all[0].shallow_clone(), |sum, tensor| sum + tensor);
    let (pending, expected) = match number % 4 {
        0 => (group.all_reduce_start(&own, ReduceOp::Sum), sum()),
        1 => (group.all_gather_start(&own, case.axis), Tensor::cat(&all, case.axis as i64)),
        2 => (group.reduce_scatter_start(&own, case.axis), part(&sum())),
        _ => {
            let pieces: Vec<_> = all.iter().map(part).collect();
            (group.all_to_all_start(&own, case.axis, case.other_axis), Tensor::cat(&pieces, case.other_axis as i64))
        }
    };
    Ok((pending.map_err(told)?, expected))
}

pub(super) fn independent_waits(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        if group.size() == 1 {
            return Ok(());
        }
        let last = group.size() - 1;
        for reduce in [ReduceOp::Sum, ReduceOp::Max] {
            // Large enough that several threads share the work.
            let own = Tensor::full([100_000], 1.0 + group.rank() as f64, (Kind::Float, group.device()));
            let pending = group.all_reduce_start(&own, reduce).map_err(told)?;
            let gathered = group.all_gather_start(&own, 0).map_err(told)?;
            // The first rank waits before it sends what the last rank receives before it waits.
            let (result, gathered) = if group.rank() == last {
                let _ = group.recv(&[1], Kind::Double, 0).map_err(told)?;
                (pending.wait(), gathered.wait())
            } else {
                let results = (pending.wait(), gathered.wait());
                if group.rank() == 0 {
                    group.send(&number(group, 1.0), last).map_err(told)?;
                }
                results
            };
            let expected = if reduce == ReduceOp::Max { last + 1 } else { (last + 1) * (last + 2) / 2 };
            let found = result.map_err(told)?.double_value(&[99_999]);
            ensure(found == expected as f64, || format!("{reduce} is {found} instead of {expected}"))?;
            let found = gathered.map_err(told)?.double_value(&[-1]);
            ensure(found == 1.0 + last as f64, || format!("the last one gathered is {found}"))?;
        }
        Ok(())
    })
}

pub(super) fn no_aliasing(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        let size = group.size() as i64;
        if size == 1 {
            // There they share storage with the input.
            return Ok(());
        }
        let ones = || Tensor::ones([4 * size, 300], (Kind::Float, group.device()));
        let collect = || -> crate::Result<Vec<(Tensor, f64)>> {
            let mut own = ones();
            let results = vec![
                (group.all_reduce(&own, ReduceOp::Sum)?, size as f64),
                (group.all_gather(&own, 1)?, 1.0),
                (group.reduce_scatter(&own, 0)?, size as f64),
                (group.all_to_all(&own, 0, 1)?, 1.0),
            ];
            // The input is free again.
            let _ = own.fill_(-7.0);
            Ok(results)
        };
        let mut results = collect().map_err(told)?;
        group.barrier().map_err(told)?;
        for (result, expected) in &mut results {
            let (low, high) = (result.min().double_value(&[]), result.max().double_value(&[]));
            ensure(low == *expected && high == low, || format!("got {low} to {high} instead of {expected}"))?;
            let _ = result.fill_(group.rank() as f64);
        }
        group.barrier().map_err(told)?;
        for (result, _) in &results {
            let (low, high) = (result.min().double_value(&[]), result.max().double_value(&[]));
            ensure(low == high && low == group.rank() as f64, || "another rank wrote into a result".to_owned())?;
        }
        Ok(())
    })
}

pub(super) fn dropped(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        if group.size() == 1 {
            return Ok(());
        }
        let before = group.recorder().total(group.name(), Op::AllReduce);
        let own = Tensor::full([1000], 1.0, (Kind::Double, group.device()));
        for round in 0..3 {
            let pending = group.all_reduce_start(&own, ReduceOp::Sum).map_err(told)?;
            if group.rank() == round % group.size() {
                drop(pending);
            } else {
                let sum = pending.wait().map_err(told)?.double_value(&[999]);
                ensure(sum == group.size() as f64, || format!("the sum is {sum}"))?;
            }
        }
        group.barrier().map_err(told)?;
        let after = group.recorder().total(group.name(), Op::AllReduce);
        let own_drops = (0..3).filter(|round| round % group.size() == group.rank()).count() as u64;
        let found = (after.count - before.count, after.dropped - before.dropped);
        ensure(found == (3, own_drops), || format!("{found:?} collectives and drops were recorded"))
    })
}
