//! The transform that shards a model.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use ferrotitan_comm::{DeviceMesh, Wire};
use ferrotitan_mesh::Mesh;
use ferrotitan_nn::{Layer, Model, NamedLayer, Parameter, Transform};

use crate::engine::Described;
use crate::sharded::{Gathering, Sharded};
use crate::{Error, Handle, Options, Result};

type Axis = dyn Fn(&Parameter) -> usize + Send + Sync;
type Wires = dyn Fn(&Parameter) -> Option<Arc<dyn Wire>> + Send + Sync;

/// Shards a model: each layer becomes a unit whose parameters are divided over the ranks of
/// [`View::FSDP`](ferrotitan_mesh::View::FSDP) and gathered while it runs.
///
/// The mesh says what this is: with one rank to shard over and several to replicate over, plain data parallelism; with
/// several of both, sharding within and replication across. Applied after whatever else divides parameters or wraps
/// layers, activation checkpointing included.
pub struct Fsdp {
    mesh: DeviceMesh,
    options: Options,
    axis: Box<Axis>,
    wires: Box<Wires>,
    handles: Mutex<Vec<Handle>>,
}

impl fmt::Debug for Fsdp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fsdp").field("mesh", &self.mesh).field("options", &self.options).finish_non_exhaustive()
    }
}

impl Fsdp {
    /// For one rank of a mesh.
    #[must_use]
    pub fn new(mesh: &DeviceMesh, options: Options) -> Self {
        let (axis, wires) = (Box::new(|_: &Parameter| 0), Box::new(|_: &Parameter| None));
        Self { mesh: mesh.clone(), options, axis, wires, handles: Mutex::default() }
    }

    /// Divides each parameter along the axis that the function says, the same on every rank, rather than the first.
    #[must_use]
    pub fn with_axis(mut self, axis: impl Fn(&Parameter) -> usize + Send + Sync + 'static) -> Self {
        self.axis = Box::new(axis);
        self
    }

    /// Sends each parameter's shards in the form that the function says, the same on every rank, where it says one.
    #[must_use]
    pub fn with_wires(mut self, wires: impl Fn(&Parameter) -> Option<Arc<dyn Wire>> + Send + Sync + 'static) -> Self {
        self.wires = Box::new(wires);
        self
    }

    /// Shards a model that has no storage yet. Ranks do it together.
    ///
    /// # Errors
    /// When a parameter has storage, no such axis, or is divided over the same ranks already;
    /// when [`Reshard::Ranks`](crate::Reshard::Ranks) does not fit the mesh.
    pub fn attach(&self, model: &mut Model) -> Result<Handle> {
        let handle = Handle::new(&self.mesh, self.options.clone())?;
        let layers = std::mem::take(model.layers_mut());
        let mut left = layers.into_iter().peekable();
        while let Some(layer) = left.next() {
            let mut layers = vec![layer];
            if let Some(group) = self.options.groups.iter().find(|group| group.contains(&layers[0].name)) {
                while let Some(next) = left.next_if(|next| group.contains(&next.name)) {
                    layers.push(next);
                }
            }
            let wrapped = self.wrap(layers, &handle)?;
            model.layers_mut().extend(wrapped);
        }
        Ok(handle)
    }

    /// What [`Transform::apply`] attached, in order: one a model.
    #[must_use]
    pub fn handles(&self) -> Vec<Handle> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes one unit of several layers.
    fn wrap(&self, layers: Vec<NamedLayer>, handle: &Handle) -> Result<Vec<NamedLayer>> {
        let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
        let parameters = layers.iter().flat_map(|named| named.layer.parameters());
        let described = parameters.map(|parameter| {
            let (axis, wire) = ((self.axis)(&parameter), (self.wires)(&parameter));
            Described { parameter, axis, wire }
        });
        let used = handle.add(&names.join("+"), described.collect())?;
        let Some(used) = used else { return Ok(layers) };
        let count = layers.len();
        let wrapped = layers.into_iter().enumerate().map(|(index, NamedLayer { name, layer: inner })| {
            let mut used = used.clone();
            used.last = index + 1 == count;
            let gathering = Gathering { engine: Arc::clone(&handle.0), used, first: index == 0 };
            NamedLayer { name, layer: Box::new(Sharded { inner, gathering }) as Box<dyn Layer> }
        });
        Ok(wrapped.collect())
    }
}

impl Transform for Fsdp {
    fn apply(&self, model: &mut Model, mesh: &dyn Mesh) -> ferrotitan_nn::Result<()> {
        let place = |mesh: &dyn Mesh| format!("rank {} of {}", mesh.rank(), mesh.degrees());
        if (mesh.rank(), mesh.degrees()) != (self.mesh.rank(), self.mesh.degrees()) {
            return Err(Error::OtherMesh { made_for: place(&self.mesh), applied_to: place(mesh) }.into());
        }
        let handle = self.attach(model)?;
        self.handles.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
        Ok(())
    }
}
