//! The reduction of a unit's gradients: one packed reduce-scatter among the ranks that shard, then, where there are
//! replicas, an all-reduce of the shard among them.

use ferrotitan_comm::{Pending, ReduceOp};
use ferrotitan_ext::storage;
use tch::{Kind, Tensor};

use crate::error::Context as _;
use crate::pack::Packing;
use crate::unit::{Groups, Member, Unit};
use crate::{Error, Result};

/// A unit's gradients under way.
#[derive(Debug)]
pub(crate) struct Reduction {
    /// Whose gradients.
    pub(crate) unit: usize,
    packing: Packing,
    /// The members that take part, and whether this rank's backward reached them.
    members: Vec<(usize, bool)>,
    stage: Stage,
}

/// Where the sums are.
#[derive(Debug)]
enum Stage {
    /// On the way to the shards' owners.
    Scatter(Pending<Tensor>),
    /// On the way between replicas.
    Replicas(Pending<Tensor>),
}

impl Reduction {
    /// Starts the reduction of everything that a unit has accumulated, in `kind`; gives none where nobody else is
    /// concerned, and the gradients are in place already.
    ///
    /// Every trainable parameter takes part, also one that this rank's backward did not reach, so that ranks agree on
    /// the collective.
    pub(crate) fn start(unit: &mut Unit, index: usize, kind: Kind, groups: &Groups) -> Result<Option<Self>> {
        unit.touched = false;
        let trainable = |member: &&mut Member| member.parameter.is_trainable();
        if groups.is_alone() {
            for member in unit.members.iter_mut().filter(trainable) {
                if let Some(gradient) = member.take_gradient()? {
                    deposit(member, &gradient)?;
                }
            }
            return Ok(None);
        }
        let taking_part = unit.members.iter().filter(|member| member.parameter.is_trainable());
        let packing = Packing::new(taking_part.map(|member| (&member.extent, kind)), groups.shard.size());
        let shape = [packing.total() as i64];
        let mut buffer = Tensor::f_empty(shape, (kind, groups.mesh.device())).context("a unit's gradients")?;
        let mut members = Vec::new();
        for (number, member) in unit.members.iter_mut().enumerate().filter(|(_, m)| m.parameter.is_trainable()) {
            // One at a time, so that each is freed once it is packed.
            let gradient = member.take_gradient()?;
            let used = gradient.is_some();
            let gradient = match gradient {
                Some(gradient) => gradient.f_contiguous(),
                None => Tensor::f_zeros([1], (kind, groups.mesh.device()))
                    .and_then(|zero| zero.f_expand(member.extent.shape(), false)),
            };
            let gradient = gradient.context("packing a gradient")?;
            let pieces =
                packing.pieces(&buffer, members.len(), &gradient, &member.extent).context("packing a gradient")?;
            for (piece, place) in pieces {
                storage::overwrite(&place, &piece)?;
            }
            members.push((number, used));
        }
        let error = unit.comm_error();
        let stage = if groups.shard.size() == 1 {
            let summed = buffer.shallow_clone();
            let pending = groups.replicate.all_reduce_start_(&mut buffer, ReduceOp::Sum).map_err(&error)?;
            Stage::Replicas(pending.map(move |()| Ok(summed)))
        } else {
            let pending = groups.shard.reduce_scatter_uneven_start(&buffer, 0, packing.sizes());
            Stage::Scatter(pending.map_err(&error)?)
        };
        Ok(Some(Self { unit: index, packing, members, stage }))
    }

    /// Waits for the stage under way. Gives the reduction back where another stage has begun; else the gradients have
    /// been added to the shards'.
    pub(crate) fn advance(self, unit: &Unit, groups: &Groups) -> Result<Option<Self>> {
        let Self { unit: index, packing, members, stage } = self;
        let error = unit.comm_error();
        let sums = match stage {
            Stage::Scatter(pending) => {
                let mut sums = pending.wait().map_err(&error)?;
                if groups.replicate.size() > 1 {
                    let summed = sums.shallow_clone();
                    let pending = groups.replicate.all_reduce_start_(&mut sums, ReduceOp::Sum).map_err(&error)?;
                    let stage = Stage::Replicas(pending.map(move |()| Ok(summed)));
                    return Ok(Some(Self { unit: index, packing, members, stage }));
                }
                sums
            }
            Stage::Replicas(pending) => pending.wait().map_err(&error)?,
        };
        for (place, &(number, used)) in members.iter().enumerate() {
            let member = &unit.members[number];
            let shard =
                packing.own(&sums, place, groups.shard.rank(), &member.extent).context("unpacking a gradient")?;
            // A parameter that nobody's backward reached has no gradient, so that the optimizer leaves it alone.
            if used || is_nonzero(&shard)? {
                deposit(member, &shard)?;
            }
        }
        Ok(None)
    }
}

fn is_nonzero(tensor: &Tensor) -> Result<bool> {
    if tensor.numel() == 0 {
        return Ok(false);
    }
    let any = tensor.f_any().context("looking for a gradient")?;
    Ok(any.double_value(&[]) != 0.0)
}

/// Adds a sum to the gradient of the member's shard, in the shard's dtype and where the shard lies.
fn deposit(member: &Member, sum: &Tensor) -> Result<()> {
    const STEP: &str = "adding to a shard's gradient";
    let local = member.parameter.local()?;
    match member.parameter.gradient()? {
        Some(mut gradient) => {
            let sum = sum.f_to_device(local.device()).context(STEP)?;
            tch::no_grad(|| gradient.f_add_(&sum)).map(drop).context(STEP)
        }
        None => {
            let sum = sum.f_to_device(local.device()).and_then(|sum| sum.f_to_kind(local.kind())).context(STEP)?;
            member.parameter.set_gradient(sum).map_err(Error::from)
        }
    }
}
