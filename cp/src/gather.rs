//! Keys and values of all ranks gathered at once.
//!
//! Backward they are gathered again: kept, they would cost every layer the memory of the whole sequence. The sources are
//! met in the ring's order, so that both methods give the same bits.

use ferrotitan_comm::{Group, Pending};
use tch::Tensor;

use crate::error::Context as _;
use crate::kernel::accumulate_in;
use crate::partial::{Gradients, Keys, Outputs};
use crate::{Plan, Result, packed};

/// Lets the queries meet everyone's keys: its own while the others' are on their way. `kv` are this rank's own, packed.
pub(crate) fn forward(outputs: &mut Outputs, q_bhsk: &Tensor, kv: &Tensor, plan: &Plan, group: &Group) -> Result<()> {
    let all = start(kv, plan, group)?;
    outputs.attend(q_bhsk, &packed::views(kv)?, plan, plan.rank)?;
    let all = all.wait()?;
    for (source, own) in others(&all, plan)? {
        outputs.attend(q_bhsk, &own, plan, source)?;
    }
    Ok(())
}

/// The gradients of this rank's keys and values, packed, in fp32 (fp64 for fp64); those of its queries go to `gradients`.
pub(crate) fn backward(gradients: &mut Gradients, kv: &Tensor, plan: &Plan, group: &Group) -> Result<Tensor> {
    let all = start(kv, plan, group)?;
    let lengths = plan.sharding.lengths();
    let sums = packed::zeros(kv, plan.sharding.padded(), accumulate_in(kv.kind()))?;
    gradients.attend(&packed::views(kv)?, &mut part(&sums, plan, plan.rank)?, plan, plan.rank)?;
    let all = all.wait()?;
    for (source, keys) in others(&all, plan)? {
        gradients.attend(&keys, &mut part(&sums, plan, source)?, plan, source)?;
    }
    drop(all);
    Ok(group.reduce_scatter_uneven(&sums, 0, &lengths)?)
}

fn start(kv: &Tensor, plan: &Plan, group: &Group) -> Result<Pending<Tensor>> {
    Ok(group.all_gather_uneven_start(kv, 0, &plan.sharding.lengths())?)
}

/// The other ranks' keys, in the order of the ring.
fn others(all: &Tensor, plan: &Plan) -> Result<Vec<(usize, Keys)>> {
    let ranks = plan.sharding.ranks();
    let sources = (1..ranks).map(|step| (plan.rank + ranks - step) % ranks);
    sources.map(|source| Ok((source, part(all, plan, source)?))).collect()
}

/// Views of one rank's part of a packed tensor.
fn part(all: &Tensor, plan: &Plan, source: usize) -> Result<Keys> {
    let lengths = plan.sharding.lengths();
    let start = lengths[..source].iter().sum::<usize>() as i64;
    let part = all.f_narrow(0, start, lengths[source] as i64).context("gathered keys and values")?;
    packed::views(&part)
}
