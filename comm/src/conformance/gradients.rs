//! The differentiable collectives against the same computation on one rank.

use tch::{Kind, Tensor};

use super::case::{Case, same};
use super::moving::ranks_values;
use super::{Ranks, Verdict, ensure, on_worlds, told};
use crate::Group;

/// A differentiable collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Form {
    AllGather,
    Gather,
    ReduceScatter,
    AllReduce,
    Copy,
    Shard,
    AllToAll,
}

impl Form {
    const ALL: [Form; 7] =
        [Form::AllGather, Form::Gather, Form::ReduceScatter, Form::AllReduce, Form::Copy, Form::Shard, Form::AllToAll];

    /// Whether all ranks hold the same tensor.
    fn same_input(self) -> bool {
        matches!(self, Form::Copy | Form::Shard)
    }

    /// Whether all ranks do the same with the result, so that it counts once.
    fn same_use(self) -> bool {
        matches!(self, Form::Gather | Form::AllReduce)
    }

    /// The shape of what group rank `rank` holds.
    fn shape(self, case: &Case, size: usize, rank: usize) -> Vec<i64> {
        let total = case.sizes(size).iter().sum();
        match self {
            Form::AllGather | Form::Gather => case.shape_with(case.axis, case.sizes[rank]),
            Form::ReduceScatter | Form::Shard => case.shape_with(case.axis, total),
            Form::AllReduce | Form::Copy => case.shape_with(case.axis, case.sizes[0]),
            Form::AllToAll => {
                let mut shape = case.shape_with(case.axis, total);
                shape[case.other_axis] =
                    if case.axis == case.other_axis { total } else { case.other_sizes[rank] } as i64;
                shape
            }
        }
    }

    /// The collective.
    fn apply(self, group: &Group, case: &Case, own: &Tensor) -> Result<Tensor, String> {
        let sizes = case.sizes(group.size());
        let (axis, even) = (case.axis, sizes.iter().all(|&length| length == sizes[0]));
        let given = (!even).then_some(sizes);
        let result = match self {
            Form::AllGather => group.all_gather_autograd(own, axis, given),
            Form::Gather => group.gather_autograd(own, axis, given),
            Form::ReduceScatter => group.reduce_scatter_autograd(own, axis, given),
            Form::AllReduce => group.all_reduce_autograd(own),
            Form::Copy => group.copy_autograd(own),
            Form::Shard => group.shard_autograd(own, axis, given),
            Form::AllToAll => {
                let stays = vec![sizes[group.rank()]; group.size()];
                let concat = if axis == case.other_axis { &stays } else { &case.other_sizes[..group.size()] };
                group.all_to_all_autograd(own, axis, case.other_axis, Some((sizes, concat)))
            }
        };
        result.map_err(told)
    }

    /// What each rank gets, from what all ranks hold, in one autograd graph.
    fn dense(self, case: &Case, all: &[Tensor]) -> Vec<Tensor> {
        let (axis, sizes) = (case.axis as i64, case.sizes(all.len()));
        let part = |tensor: &Tensor, rank: usize| {
            let offset: usize = sizes[..rank].iter().sum();
            tensor.narrow(axis, offset as i64, sizes[rank] as i64)
        };
        let sum = || all[1..].iter().fold(all[0].shallow_clone(), |sum, tensor| sum + tensor);
        let ranks = 0..all.len();
        match self {
            Form::AllGather | Form::Gather => ranks.map(|_| Tensor::cat(all, axis)).collect(),
            Form::ReduceScatter => ranks.map(|rank| part(&sum(), rank)).collect(),
            Form::AllReduce => ranks.map(|_| sum()).collect(),
            Form::Copy => all.iter().map(Tensor::shallow_clone).collect(),
            Form::Shard => ranks.map(|rank| part(&all[rank], rank)).collect(),
            Form::AllToAll => ranks
                .map(|to| {
                    let pieces: Vec<_> = all.iter().map(|tensor| part(tensor, to)).collect();
                    Tensor::cat(&pieces, case.other_axis as i64)
                })
                .collect(),
        }
    }
}

pub(super) fn gradients(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        for seed in 0..6 {
            for form in Form::ALL {
                let case = Case::draw(seed ^ 0x6772_6164, &[Kind::Double]);
                check_gradient(group, &case, form).map_err(|found| format!("{form:?}, {case:?}: {found}"))?;
            }
        }
        Ok(())
    })
}

/// One form against the dense computation: result and gradient of a sum of squares of the results, each rank's with a
/// weight of its own.
fn check_gradient(group: &Group, case: &Case, form: Form) -> Verdict {
    let (size, rank) = (group.size(), group.rank());
    let weight = |rank: usize| if form.same_use() { 1.5 } else { 1.0 + rank as f64 };
    let mut leaves = match form.same_input() {
        true => vec![case.values(group.ranks()[0], &form.shape(case, size, 0))?],
        false => ranks_values(group, case, |rank| form.shape(case, size, rank))?,
    };
    leaves = leaves.into_iter().map(|leaf| leaf.set_requires_grad(true)).collect();
    let all: Vec<_> = (0..size).map(|rank| leaves[if form.same_input() { 0 } else { rank }].shallow_clone()).collect();
    let expected = form.dense(case, &all);
    let loss = |result: &Tensor, rank: usize| (result * result).sum(Kind::Double) * weight(rank);
    let counted = if form.same_use() { 0..1 } else { 0..size };
    let total: Tensor = counted.map(|rank| loss(&expected[rank], rank)).sum();
    total.f_backward().map_err(told)?;

    let place = if form.same_input() { 0 } else { rank };
    let own = leaves[place].detach().to_device(group.device()).set_requires_grad(true);
    let result = form.apply(group, case, &own)?;
    same(&result, &expected[rank])?;
    loss(&result, rank).f_backward().map_err(told)?;
    same(&own.grad(), &leaves[place].grad()).map_err(|found| format!("its gradient: {found}"))
}

pub(super) fn unused_results(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        let own = Tensor::full([2], 1.0 + group.rank() as f64, (Kind::Double, group.device())).set_requires_grad(true);
        let all = group.all_gather_autograd(&own, 0, None).map_err(told)?;
        // Only the first rank uses the result, and the others multiply it by zero.
        let used = if group.rank() == 0 { 3.0 } else { 0.0 };
        (all * used).sum(Kind::Double).f_backward().map_err(told)?;
        same(&own.grad(), &Tensor::full([2], 3.0, (Kind::Double, tch::Device::Cpu)))?;
        // Without a gradient to follow, nothing is recorded in the graph.
        let plain = group.copy_autograd(&own.detach()).map_err(told)?;
        ensure(!plain.requires_grad(), || "a result of a constant requires a gradient".to_owned())
    })
}
