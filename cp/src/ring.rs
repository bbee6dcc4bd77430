//! Keys and values passed round a ring of ranks.
//!
//! At step j a rank computes with the keys and values of the rank j places before it, while those for the next step are
//! on their way. Backward their gradients follow one step behind: each rank adds its own part to what arrives and passes
//! it on, so that after a full round the sum is back with its owner.

use ferrotitan_comm::{Group, Pending};
use tch::Tensor;

use crate::error::Context as _;
use crate::kernel::accumulate_in;
use crate::partial::{Gradients, Outputs};
use crate::{Plan, Result, packed};

/// Lets the queries meet everyone's keys. `kv` are this rank's own, packed.
pub(crate) fn forward(outputs: &mut Outputs, q_bhsk: &Tensor, kv: &Tensor, plan: &Plan, group: &Group) -> Result<()> {
    let ring = Ring::new(plan, group);
    let mut kv = kv.shallow_clone();
    for step in 0..ring.size {
        let passing = ring.pass_keys(&kv, step)?;
        outputs.attend(q_bhsk, &packed::views(&kv)?, plan, ring.source(step))?;
        if let Some(passing) = passing {
            kv = passing.wait()?;
        }
    }
    Ok(())
}

/// The gradients of this rank's keys and values, packed, in fp32 (fp64 for fp64); those of its queries go to `gradients`.
pub(crate) fn backward(gradients: &mut Gradients, kv: &Tensor, plan: &Plan, group: &Group) -> Result<Tensor> {
    let ring = Ring::new(plan, group);
    let mut kv = kv.shallow_clone();
    let mut passing_sum: Option<Passing> = None;
    for step in 0..ring.size {
        let passing = ring.pass_keys(&kv, step)?;
        let mut sum = packed::zeros(&kv, kv.size()[0], accumulate_in(kv.kind()))?;
        gradients.attend(&packed::views(&kv)?, &mut packed::views(&sum)?, plan, ring.source(step))?;
        if let Some(others) = passing_sum.take() {
            let _ = sum.f_add_(&others.wait()?).context("adding gradients of keys and values")?;
        }
        passing_sum = Some(ring.pass(&sum, step)?);
        if let Some(passing) = passing {
            kv = passing.wait()?;
        }
    }
    // The last step's sum, of the keys that the next rank owns, is sent there; what arrives is of this rank's own.
    passing_sum.expect("a ring has at least one rank, so there was a step").wait()
}

struct Ring<'a> {
    group: &'a Group,
    lengths: Vec<usize>,
    rank: usize,
    size: usize,
}

impl<'a> Ring<'a> {
    fn new(plan: &Plan, group: &'a Group) -> Self {
        Ring { group, lengths: plan.sharding.lengths(), rank: group.rank(), size: group.size() }
    }

    /// Whose keys are computed with at a step.
    fn source(&self, step: usize) -> usize {
        (self.rank + self.size - step % self.size) % self.size
    }

    /// Passes keys and values on, unless everyone has met them.
    fn pass_keys(&self, kv: &Tensor, step: usize) -> Result<Option<Passing>> {
        (step + 1 < self.size).then(|| self.pass(kv, step)).transpose()
    }

    /// Sends what belongs to this step's source to the next rank, and receives from the one before what belongs to the
    /// next step's.
    fn pass(&self, x: &Tensor, step: usize) -> Result<Passing> {
        if self.size == 1 {
            return Ok(Passing { send: Pending::ready(()), recv: Pending::ready(x.shallow_clone()) });
        }
        let (next, previous) = (self.source(self.size - 1), self.source(1));
        let shape = packed::shape(x, self.lengths[self.source(step + 1)] as i64);
        let send = || self.group.send_start(x, next);
        let recv = || self.group.recv_start(&shape, x.kind(), previous);
        // NCCL runs what two ranks send each other in the order in which each of them calls it, so that in a ring of two
        // one of them must receive first.
        if self.rank.is_multiple_of(2) {
            let send = send()?;
            return Ok(Passing { send, recv: recv()? });
        }
        let recv = recv()?;
        Ok(Passing { send: send()?, recv })
    }
}

/// A tensor on its way to the next rank, and one on its way from the rank before.
struct Passing {
    send: Pending<()>,
    recv: Pending<Tensor>,
}

impl Passing {
    /// What has arrived.
    fn wait(self) -> Result<Tensor> {
        let arrived = self.recv.wait()?;
        self.send.wait()?;
        Ok(arrived)
    }
}
