//! What a training loop, or a pipeline, holds of a sharded model.

use std::sync::Arc;

use ferrotitan_comm::DeviceMesh;
use ferrotitan_nn::Parameter;

use crate::engine::{Described, Engine, Use};
use crate::sharded::{Gathering, Unit};
use crate::{Error, Event, Options, Result, Stats};

/// The units of one model on one rank. Clones are the same units.
///
/// Every rank calls the same methods in the same order, as with the collectives that they lead to.
#[derive(Clone, Debug)]
pub struct Handle(pub(crate) Arc<Engine>);

impl Handle {
    /// Without units yet: for parameters that belong to no [`Model`](ferrotitan_nn::Model). Ranks make it together.
    ///
    /// # Errors
    /// When [`Reshard::Ranks`](crate::Reshard::Ranks) does not fit the mesh, or a group cannot be joined.
    pub fn new(mesh: &DeviceMesh, options: Options) -> Result<Self> {
        Ok(Self(Arc::new(Engine::new(mesh.clone(), options)?)))
    }

    /// Makes a unit of parameters without storage, each divided along its first axis. One that another unit has already
    /// stays that unit's, and is gathered for both.
    ///
    /// # Errors
    /// When a parameter has storage, no axis, or is divided over the same ranks already; or when there is none to make
    /// a unit of.
    pub fn unit(&self, name: &str, parameters: impl IntoIterator<Item = Parameter>) -> Result<Unit> {
        let parameters = parameters.into_iter().map(|parameter| Described { parameter, axis: 0, wire: None }).collect();
        let used = self.add(name, parameters)?;
        let used = used.ok_or_else(|| Error::Empty { name: name.to_owned() })?;
        Ok(Unit(Gathering { engine: Arc::clone(&self.0), used, first: true }))
    }

    /// The use of a unit made of these parameters, or of the units that they belong to; none without parameters.
    pub(crate) fn add(&self, name: &str, parameters: Vec<Described>) -> Result<Option<Use>> {
        let (made, mut owners) = self.0.add(name, parameters)?;
        let unit = match made {
            Some(unit) => unit,
            // It runs with other units' parameters alone.
            None if owners.is_empty() => return Ok(None),
            None => owners.remove(0),
        };
        Ok(Some(Use { unit, borrowed: owners.into(), last: true }))
    }

    /// Whether the end of a unit's backward reduces its gradients; at first it does.
    ///
    /// Otherwise gradients are summed on this rank, whole and in the reduction's dtype, and the first backward pass with
    /// reduction takes them along: accumulation over microbatches that communicates once. The result is the same.
    pub fn set_requires_reduction(&self, value: bool) {
        self.0.state().requires_reduction = value;
    }

    /// Ends a backward pass: releases what is still gathered, reduces what has not been (the first layer's gradients
    /// are complete only now), and waits for all reductions. After it, each parameter's
    /// [`gradient`](Parameter::gradient) is that of its shard, summed over all ranks, if reduction is required.
    ///
    /// Call it after every backward pass, or once after several, before gradients are read or parameters changed.
    ///
    /// # Errors
    /// When a rank fails or libtorch does.
    pub fn finish_backward(&self) -> Result<()> {
        self.0.finish_backward()
    }

    /// How many units there are.
    #[must_use]
    pub fn units(&self) -> usize {
        self.0.state().units.len()
    }

    /// A unit's name: that of its layers, joined by `+`.
    ///
    /// # Errors
    /// When there is no such unit.
    pub fn name(&self, unit: usize) -> Result<String> {
        self.check(unit)?;
        Ok(self.0.state().units[unit].name.clone())
    }

    /// Starts the gather of a unit and returns; its next forward or backward waits for it. It stays gathered until
    /// [`reshard`](Self::reshard), whatever the options say: a pipeline gathers its stage once a step.
    ///
    /// # Errors
    /// When there is no such unit, it has no storage, or a rank fails.
    pub fn unshard(&self, unit: usize) -> Result<()> {
        self.check(unit)?;
        self.0.pin(unit)
    }

    /// Releases a unit. To be called before parameters change.
    ///
    /// # Errors
    /// When there is no such unit, or a rank fails.
    pub fn reshard(&self, unit: usize) -> Result<()> {
        self.check(unit)?;
        self.0.unpin(unit)
    }

    /// Reduces what a unit's backward passes have accumulated, if any was since the last reduction, and waits for it.
    ///
    /// # Errors
    /// When there is no such unit, or a rank fails.
    pub fn reduce(&self, unit: usize) -> Result<()> {
        self.check(unit)?;
        self.0.reduce(unit)
    }

    /// [`unshard`](Self::unshard) for every unit.
    ///
    /// # Errors
    /// As there.
    pub fn unshard_all(&self) -> Result<()> {
        (0..self.units()).try_for_each(|unit| self.0.pin(unit))
    }

    /// [`reshard`](Self::reshard) for every unit.
    ///
    /// # Errors
    /// As there.
    pub fn reshard_all(&self) -> Result<()> {
        (0..self.units()).try_for_each(|unit| self.0.unpin(unit))
    }

    /// How much is gathered, and how often.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.0.state().log.stats
    }

    /// What the units did of late, oldest first. Taking the events forgets them.
    #[must_use]
    pub fn take_events(&self) -> Vec<Event> {
        self.0.state().log.events.drain(..).collect()
    }

    fn check(&self, unit: usize) -> Result<()> {
        let count = self.units();
        if unit < count { Ok(()) } else { Err(Error::NoSuchUnit { unit, count }) }
    }
}
