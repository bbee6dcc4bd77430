//! A unit: parameters that are gathered, released and reduced together.

use std::sync::Arc;

use ferrotitan_comm::{DeviceMesh, Group, Pending, Wire};
use ferrotitan_ext::{autograd, storage};
use ferrotitan_mesh::{Mesh, View};
use ferrotitan_nn::Parameter;
use tch::{Kind, Tensor};

use crate::error::Context as _;
use crate::pack::{Extent, Packing};
use crate::{Error, Result};

/// Who takes part in what.
#[derive(Debug)]
pub(crate) struct Groups {
    pub(crate) mesh: DeviceMesh,
    /// The ranks that hold one copy of the parameters together.
    pub(crate) shard: Group,
    /// The ranks that hold the same shards.
    pub(crate) replicate: Group,
    /// Of the first, those among which parameters stay between forward and backward, where that is not the rank alone.
    pub(crate) block: Option<Group>,
}

impl Groups {
    pub(crate) fn new(mesh: DeviceMesh, block: Option<usize>) -> Result<Self> {
        let size = mesh.size(View::FSDP);
        let block = match block {
            Some(ranks) if ranks == 0 || !size.is_multiple_of(ranks) => return Err(Error::Ranks { ranks, size }),
            Some(ranks) => Some(mesh.block(View::FSDP, ranks)?),
            None => None,
        };
        Ok(Self { shard: mesh.group(View::FSDP)?, replicate: mesh.group(View::DP_REPLICATE)?, block, mesh })
    }

    /// Whether nobody else has gradients of the same parameters.
    pub(crate) fn is_alone(&self) -> bool {
        self.shard.size() == 1 && self.replicate.size() == 1
    }
}

/// What has become of a unit's parameters on this rank.
#[derive(Debug)]
pub(crate) enum Status {
    /// This rank has its shard alone.
    Sharded,
    /// The others' are on their way.
    Flying(Pending<Tensor>),
    /// All are there.
    Gathered,
}

/// A parameter of a unit.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) parameter: Parameter,
    pub(crate) extent: Extent,
    wire: Option<Arc<dyn Wire>>,
    /// What forward passes compute with, a leaf for the whole life of the unit: what autograd saved of it sees the
    /// storage that is refilled, so nothing is computed again. Made before its first use.
    leaf: Option<Tensor>,
    /// Whether the leaf shares the shard's memory, since that is all there is.
    alias: bool,
    /// The sum of this rank's gradients that have not been reduced, whole, in the reduction's dtype.
    sum: Option<Tensor>,
}

impl Member {
    pub(crate) fn new(parameter: Parameter, wire: Option<Arc<dyn Wire>>, mesh: &DeviceMesh) -> Result<Self> {
        let layout = |source| Error::Layout { name: parameter.name().to_owned(), source };
        let extent = Extent::new(&parameter.layout(), mesh).map_err(layout)?;
        Ok(Self { parameter, extent, wire, leaf: None, alias: false, sum: None })
    }

    fn leaf(&self) -> &Tensor {
        self.leaf.as_ref().expect("every way to a unit's leaves leads through `prepare`")
    }

    /// Makes the leaf and puts it in the shard's place.
    fn prepare(&mut self, groups: &Groups) -> Result<()> {
        let local = self.parameter.local()?;
        let (kind, device) = (self.parameter.compute_kind().unwrap_or(local.kind()), groups.mesh.device());
        self.alias =
            groups.shard.size() == 1 && self.wire.is_none() && (kind, device) == (local.kind(), local.device());
        let leaf = match self.alias {
            true => local.f_detach().context("a view of a parameter")?,
            false => {
                let leaf = Tensor::f_empty(self.extent.shape(), (kind, device)).context("a gathered parameter")?;
                storage::release(&leaf)?;
                leaf
            }
        };
        let leaf = leaf.set_requires_grad(self.parameter.is_trainable());
        self.parameter.set_value(Some(leaf.shallow_clone()));
        self.leaf = Some(leaf);
        Ok(())
    }

    fn wire_kind(&self) -> Kind {
        self.wire.as_ref().map_or(self.leaf().kind(), |wire| wire.kind())
    }

    fn wire_error(&self) -> impl Fn(ferrotitan_comm::BoxError) -> Error + '_ {
        |source| Error::Wire { name: self.parameter.name().to_owned(), source }
    }

    /// What has been accumulated since it was last taken; nothing where no backward pass reached the parameter.
    pub(crate) fn take_gradient(&mut self) -> Result<Option<Tensor>> {
        let gradient = self.leaf().grad();
        if !gradient.defined() {
            return Ok(self.sum.take());
        }
        autograd::set_gradient(self.leaf(), None)?;
        match self.sum.take() {
            Some(mut sum) => {
                let added = tch::no_grad(|| sum.f_add_(&gradient).map(drop));
                added.context("accumulating a gradient")?;
                Ok(Some(sum))
            }
            None => Ok(Some(gradient)),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) name: String,
    pub(crate) members: Vec<Member>,
    pub(crate) status: Status,
    /// Whether another unit's layer uses one of the parameters as well.
    pub(crate) shared: bool,
    /// Whether it stays gathered until somebody reshards it.
    pub(crate) pinned: bool,
    /// Forward passes whose backward has not come yet.
    pub(crate) forwards: usize,
    /// Whether a forward pass since the last reduction may have led to gradients.
    pub(crate) touched: bool,
    /// How shards travel; made with the leaves.
    packing: Option<Packing>,
    /// This rank's stretch of the gathered buffer, where parameters stay within a block.
    stretch: Option<Tensor>,
}

impl Unit {
    pub(crate) fn new(name: String, members: Vec<Member>) -> Self {
        Self {
            name,
            members,
            status: Status::Sharded,
            shared: false,
            pinned: false,
            forwards: 0,
            touched: false,
            packing: None,
            stretch: None,
        }
    }

    /// Makes the leaves, once the parameters have storage, and keeps up with what has been frozen.
    pub(crate) fn prepare(&mut self, groups: &Groups) -> Result<()> {
        if self.packing.is_none() {
            self.members.iter_mut().try_for_each(|member| member.prepare(groups))?;
            let travelling = self.members.iter().filter(|member| !member.alias);
            let kinds = travelling.map(|member| (&member.extent, member.wire_kind()));
            self.packing = Some(Packing::new(kinds, groups.shard.size()));
        }
        for member in &self.members {
            let leaf = member.leaf();
            if leaf.requires_grad() != member.parameter.is_trainable() {
                let _ = leaf.set_requires_grad(member.parameter.is_trainable());
            }
        }
        Ok(())
    }

    /// Whether this rank's shards are all there is, so that nothing is ever gathered or released.
    pub(crate) fn is_whole(&self) -> bool {
        self.members.iter().all(|member| member.alias)
    }

    pub(crate) fn is_trainable(&self) -> bool {
        self.members.iter().any(|member| member.parameter.is_trainable())
    }

    /// The dtype that its parameters are computed with, where one is set.
    pub(crate) fn compute_kind(&self) -> Option<Kind> {
        self.members.iter().find_map(|member| member.parameter.compute_kind())
    }

    pub(crate) fn comm_error(&self) -> impl Fn(ferrotitan_comm::Error) -> Error + '_ {
        |source| Error::Comm { unit: self.name.clone(), source }
    }

    fn packing(&self) -> &Packing {
        self.packing.as_ref().expect("every way to a unit's leaves leads through `prepare`")
    }

    fn travelling(&self) -> impl Iterator<Item = (usize, &Member)> {
        self.members.iter().filter(|member| !member.alias).enumerate()
    }

    /// Sends this rank's shards on their way to the others.
    pub(crate) fn start_gather(&mut self, groups: &Groups) -> Result<()> {
        let packing = self.packing();
        let pending = match (&self.stretch, &groups.block) {
            (Some(stretch), Some(block)) => {
                let sizes: Vec<usize> =
                    (0..block.size()).map(|rank| cut(packing.total(), rank, block.size()).1).collect();
                block.all_gather_uneven_start(stretch, 0, &sizes)
            }
            _ => {
                let (rank, kind) = (groups.shard.rank(), packing.kind());
                let own = Tensor::f_empty([packing.sizes()[rank] as i64], (kind, groups.mesh.device()));
                let own = own.context("a unit's shards")?;
                for (index, member) in self.travelling() {
                    let local = member.parameter.local()?;
                    let mut place = packing.own(&own, index, rank, &member.extent).context("packing a shard")?;
                    match &member.wire {
                        Some(wire) => {
                            tch::no_grad(|| wire.encode(&local.detach(), &mut place)).map_err(member.wire_error())?
                        }
                        None => storage::overwrite(&place, &local)?,
                    }
                }
                groups.shard.all_gather_uneven_start(&own, 0, packing.sizes())
            }
        };
        let pending = pending.map_err(self.comm_error())?;
        self.status = Status::Flying(pending);
        Ok(())
    }

    /// Waits for the others' shards, and fills the leaves.
    pub(crate) fn finish_gather(&mut self, groups: &Groups) -> Result<()> {
        let Status::Flying(pending) = std::mem::replace(&mut self.status, Status::Sharded) else { return Ok(()) };
        let buffer = pending.wait().map_err(self.comm_error())?;
        for (index, member) in self.travelling() {
            storage::refill(member.leaf())?;
            // The same memory with a version counter of its own: the values are what they were, so what autograd saved
            // stays right.
            let target = member.leaf().f_data().context("a gathered parameter")?;
            let pieces =
                self.packing().pieces(&buffer, index, &target, &member.extent).context("unpacking a parameter")?;
            for (mut piece, place) in pieces {
                match &member.wire {
                    Some(wire) => tch::no_grad(|| wire.decode(&place, &mut piece)).map_err(member.wire_error())?,
                    None => storage::overwrite(&piece, &place)?,
                }
            }
        }
        if let (None, Some(block)) = (&self.stretch, &groups.block) {
            let (start, length) = cut(self.packing().total(), block.rank(), block.size());
            let stretch = buffer.f_narrow(0, start as i64, length as i64).and_then(|stretch| {
                let mut copy = stretch.f_empty_like()?;
                copy.f_copy_(&stretch)?;
                Ok(copy)
            });
            self.stretch = Some(stretch.context("a block's part of a unit")?);
        }
        self.status = Status::Gathered;
        Ok(())
    }

    /// Gives the gathered parameters' memory back.
    pub(crate) fn release(&self) -> Result<()> {
        self.travelling().try_for_each(|(_, member)| Ok(storage::release(member.leaf())?))
    }

    /// Forgets a block's part of the parameters, whose values are about to change.
    pub(crate) fn forget_stretch(&mut self) {
        self.stretch = None;
    }

    /// Moves this pass's gradients into the sums.
    pub(crate) fn accumulate(&mut self, kind: Kind) -> Result<()> {
        for member in &mut self.members {
            if let Some(gradient) = member.take_gradient()? {
                member.sum = Some(gradient.f_to_kind(kind).context("accumulating a gradient")?);
            }
        }
        Ok(())
    }

    /// In what its gradients are summed, where the options do not say.
    pub(crate) fn reduce_kind(&self) -> Result<Kind> {
        for member in &self.members {
            if member.parameter.local()?.kind() == Kind::Double {
                return Ok(Kind::Double);
            }
        }
        Ok(Kind::Float)
    }
}

/// Where part `rank` of `ranks` nearly equal parts of a length begins, and how long it is.
fn cut(length: usize, rank: usize, ranks: usize) -> (usize, usize) {
    let bound = |rank: usize| length / ranks * rank + (length % ranks).min(rank);
    (bound(rank), bound(rank + 1) - bound(rank))
}
