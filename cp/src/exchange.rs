//! Sequences exchanged for heads: each rank computes some of the heads over the whole sequence.
//!
//! Queries, keys and values travel in one exchange, and their gradients in another. Query heads are dealt out as evenly as
//! they will go; a rank gets the key-value heads that its query heads need, so that one of them may go to several ranks,
//! whose gradients its owner adds.
//!
//! Shape suffixes: b batch, s tokens, h query heads, g key-value heads, k features of a head.

use std::ops::Range;

use ferrotitan_comm::Group;
use tch::{Kind, Tensor};

use crate::error::Context as _;
use crate::kernel::accumulate_in;
use crate::partial::{Gradients, Keys, Outputs};
use crate::sharding::chunks;
use crate::{Plan, Result};

/// Which heads each rank computes.
#[derive(Debug, Clone)]
pub(crate) struct Heads {
    queries: Vec<Range<i64>>,
    keys: Vec<Range<i64>>,
    /// Query heads of a key-value head.
    group: i64,
}

impl Heads {
    pub(crate) fn new(heads: i64, kv_heads: i64, ranks: usize) -> Self {
        let group = heads / kv_heads;
        let queries: Vec<_> = chunks(heads as usize, ranks).map(|part| part.start as i64..part.end as i64).collect();
        let needed = |part: &Range<i64>| match part.is_empty() {
            true => 0..0,
            false => part.start / group..(part.end - 1) / group + 1,
        };
        let keys = queries.iter().map(needed).collect();
        Self { queries, keys, group }
    }

    /// How many heads of queries, keys and values each rank gets.
    fn sizes(&self) -> Vec<usize> {
        self.queries.iter().zip(&self.keys).map(|(q, k)| (length(q) + 2 * length(k)) as usize).collect()
    }

    /// How many query heads each rank computes.
    fn query_sizes(&self) -> Vec<usize> {
        self.queries.iter().map(|part| length(part) as usize).collect()
    }

    /// Whether some key-value head goes to several ranks.
    fn replicates(&self) -> bool {
        let needed = self.keys.iter().filter(|part| !part.is_empty());
        needed.clone().zip(needed.skip(1)).any(|(a, b)| a.end > b.start)
    }

    /// For each query head of a rank, which of its key-value heads it needs; nothing where each of those serves equally
    /// many, which kernels take as it is.
    fn served_by(&self, rank: usize) -> Option<Vec<i64>> {
        let (queries, keys) = (&self.queries[rank], &self.keys[rank]);
        let served: Vec<i64> = queries.clone().map(|head| head / self.group - keys.start).collect();
        let each = length(queries) / length(keys).max(1);
        let even = served.iter().enumerate().all(|(index, &head)| index as i64 / each.max(1) == head);
        (!even || each * length(keys) != length(queries)).then_some(served)
    }
}

/// Some heads over the whole sequence, in its order: what a rank has after the exchange.
pub(crate) struct Whole {
    /// Queries, keys and values `[s, heads, b, k]`, one after the other along the heads.
    pub(crate) qkv: Tensor,
}

/// Exchanges all ranks' parts of the sequence for this rank's heads.
pub(crate) fn gather(q: &Tensor, k: &Tensor, v: &Tensor, heads: &Heads, plan: &Plan, group: &Group) -> Result<Whole> {
    let pack = || {
        let mut parts = Vec::new();
        for (queries, keys) in heads.queries.iter().zip(&heads.keys) {
            for (x, part) in [(q, queries), (k, keys), (v, keys)] {
                parts.push(tokens_first(x)?.f_narrow(1, part.start, length(part))?);
            }
        }
        Tensor::f_cat(&parts, 1)
    };
    let packed = pack().context("packing heads")?;
    let arrived = group.all_to_all_uneven(&packed, 1, 0, &heads.sizes(), &plan.sharding.lengths())?;
    drop(packed);
    Ok(Whole { qkv: plan.sharding.to_global(&arrived, 0)? })
}

impl Whole {
    /// The queries, keys and values as the kernel wants them, all `[b, heads, s, k]`.
    fn views(&self, heads: &Heads, rank: usize) -> Result<(Tensor, Keys)> {
        let (queries, keys) = (length(&heads.queries[rank]), length(&heads.keys[rank]));
        let served_by = heads.served_by(rank).map(|served| Tensor::from_slice(&served).to_device(self.qkv.device()));
        let view = |start, count| self.qkv.f_narrow(1, start, count)?.f_permute([2, 1, 0, 3]);
        let keys_view = |start| match &served_by {
            Some(served) => view(start, keys)?.f_index_select(1, served),
            None => view(start, keys),
        };
        let views = || Ok((view(0, queries)?, Keys { k: keys_view(queries)?, v: keys_view(queries + keys)? }));
        views().context("unpacking heads")
    }
}

/// The attention of this rank's heads: their output `[b, h, s, k]` over the whole sequence, and its log-sum-exp.
pub(crate) fn attend(whole: &Whole, heads: &Heads, plan: &Plan) -> Result<(Tensor, Tensor)> {
    let (q, keys) = whole.views(heads, plan.rank)?;
    let mut outputs = Outputs::new(&q)?;
    outputs.attend(&q, &keys, plan, 0)?;
    outputs.finish(&q)
}

/// Exchanges the output of this rank's heads for that of all heads on its part of the sequence, `[b, s, h, k]`.
pub(crate) fn scatter(out_bhsk: &Tensor, heads: &Heads, plan: &Plan, group: &Group) -> Result<Tensor> {
    let in_order = out_bhsk.f_permute([2, 1, 0, 3]).context("packing heads")?;
    let packed = plan.sharding.to_ranks(&in_order, 0)?;
    let arrived = group.all_to_all_uneven(&packed, 0, 1, &plan.sharding.lengths(), &heads.query_sizes())?;
    drop(packed);
    let turned = arrived.f_permute([2, 0, 1, 3]).and_then(|out| out.f_contiguous());
    turned.context("unpacking heads")
}

/// The gradients of this rank's queries, keys and values, `[b, s, heads, k]`, from that of its output `[b, s, h, k]`.
pub(crate) fn backward(
    grad: &Tensor,
    whole: &Whole,
    out: Tensor,
    lse: Tensor,
    heads: &Heads,
    plan: &Plan,
    group: &Group,
) -> Result<[Tensor; 3]> {
    let grad = tokens_first(grad).context("packing heads")?;
    let grad = group.all_to_all_uneven(&grad, 1, 0, &heads.query_sizes(), &plan.sharding.lengths())?;
    let grad = plan.sharding.to_global(&grad, 0)?.f_permute([2, 1, 0, 3]).context("unpacking heads")?;

    let (q, keys) = whole.views(heads, plan.rank)?;
    let zeros = |x: &Tensor| x.f_zeros_like()?.f_to_kind(accumulate_in(x.kind()));
    let zeros = || Ok(Keys { k: zeros(&keys.k)?, v: zeros(&keys.v)? });
    let mut sums = zeros().context("attention's backward")?;
    let mut gradients = Gradients::new(grad, q, out, lse)?;
    gradients.attend(&keys, &mut sums, plan, 0)?;

    let kind = whole.qkv.kind();
    // Where several ranks have computed with one key-value head, its gradient is still to be summed.
    let travels_in = if heads.replicates() { accumulate_in(kind) } else { kind };
    let served_by = heads.served_by(plan.rank);
    let count = length(&heads.keys[plan.rank]);
    // What is packed is dropped as soon as it is.
    let pack = move || {
        let keys = |x: &Tensor| over_heads(x, served_by.as_deref(), count);
        let parts = [gradients.finish(), keys(&sums.k)?, keys(&sums.v)?];
        let parts = parts.iter().map(|x| x.f_permute([2, 1, 0, 3])?.f_to_kind(travels_in));
        Tensor::f_cat(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 1)
    };
    let packed = plan.sharding.to_ranks(&pack().context("packing heads")?, 0)?;
    let arrived = group.all_to_all_uneven(&packed, 0, 1, &plan.sharding.lengths(), &heads.sizes())?;
    drop(packed);
    own_gradients(&arrived, heads, kind)
}

/// Takes the ranks' gradients `[s, heads, b, k]` apart, and adds those of the same head.
fn own_gradients(arrived: &Tensor, heads: &Heads, kind: Kind) -> Result<[Tensor; 3]> {
    let arrived = arrived.f_permute([2, 0, 1, 3]).context("unpacking heads")?;
    let sum_of = |index: usize| {
        let parts = |rank: usize| [&heads.queries[rank], &heads.keys[rank], &heads.keys[rank]];
        let ranks = heads.queries.len();
        let mut shape = arrived.size();
        shape[2] = (0..ranks).map(|rank| parts(rank)[index].end).max().unwrap_or(0);
        let sum = Tensor::f_zeros(shape, (arrived.kind(), arrived.device()))?;
        let mut start = 0;
        for rank in 0..ranks {
            let parts = parts(rank);
            let before: i64 = parts[..index].iter().copied().map(length).sum();
            let arrived = arrived.f_narrow(2, start + before, length(parts[index]))?;
            let _ = sum.f_narrow(2, parts[index].start, length(parts[index]))?.f_add_(&arrived)?;
            start += parts.into_iter().map(length).sum::<i64>();
        }
        sum.f_to_kind(kind)
    };
    let sum_of = |index| sum_of(index).context("adding gradients of heads");
    Ok([sum_of(0)?, sum_of(1)?, sum_of(2)?])
}

/// The sum over the query heads that one key-value head was copied for.
fn over_heads(x_bhsk: &Tensor, served_by: Option<&[i64]>, count: i64) -> std::result::Result<Tensor, tch::TchError> {
    let Some(served_by) = served_by else { return Ok(x_bhsk.shallow_clone()) };
    let mut shape = x_bhsk.size();
    shape[1] = count;
    let sum = Tensor::f_zeros(shape, (x_bhsk.kind(), x_bhsk.device()))?;
    for (head, &served) in served_by.iter().enumerate() {
        let _ = sum.f_narrow(1, served, 1)?.f_add_(&x_bhsk.f_narrow(1, head as i64, 1)?)?;
    }
    Ok(sum)
}

/// `[b, s, heads, k]` as `[s, heads, b, k]`.
fn tokens_first(x: &Tensor) -> std::result::Result<Tensor, tch::TchError> {
    x.f_permute([1, 2, 0, 3])
}

fn length(range: &Range<i64>) -> i64 {
    range.end - range.start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_dealt_out() {
        // 12 query heads, 3 to a key-value head, over 4 ranks: each has a whole group.
        let heads = Heads::new(12, 4, 4);
        assert_eq!((heads.sizes(), heads.replicates()), (vec![5; 4], false));
        assert!((0..4).all(|rank| heads.served_by(rank).is_none()));
        // 4 heads of one key-value head over 2 ranks: both need it, each in the kernel's own grouping.
        let heads = Heads::new(4, 1, 2);
        assert_eq!((heads.sizes(), heads.replicates()), (vec![4; 2], true));
        assert_eq!(heads.served_by(1), None);
        // 6 heads of 2 over 4 ranks: 1, 2, 1, 2 heads; no rank's heads belong to two.
        let heads = Heads::new(6, 2, 4);
        assert_eq!((heads.query_sizes(), heads.sizes()), (vec![1, 2, 1, 2], vec![3, 4, 3, 4]));
        // 6 heads of 3 over 2 ranks: 0, 1, 2 need 0, 0, 1, and the middle key-value head goes to both.
        let heads = Heads::new(6, 3, 2);
        assert_eq!((heads.served_by(0), heads.served_by(1)), (Some(vec![0, 0, 1]), Some(vec![0, 1, 1])));
        assert!(heads.replicates());
        // More ranks than heads.
        let heads = Heads::new(2, 1, 3);
        assert_eq!((heads.query_sizes(), heads.sizes()), (vec![0, 1, 1], vec![0, 3, 3]));
        assert_eq!(heads.served_by(0), None);
    }
}
