//! The mesh of devices as one rank sees it, with the groups that it communicates in.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use ferrotitan_mesh::{Degrees, Grid, Mesh, View};
use tch::Device;

use crate::{Backend, Error, Group, Members, Recorder, Result};

/// One rank's place in a mesh, the device it computes on, and its groups. Clones are the same rank.
#[derive(Clone, Debug)]
pub struct DeviceMesh(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    grid: Grid,
    device: Device,
    recorder: Recorder,
    /// Absent exactly in a mesh of one rank.
    backend: Option<Arc<dyn Backend>>,
    /// By view and number of members.
    groups: Mutex<HashMap<(View, usize), Group>>,
}

impl DeviceMesh {
    /// The views whose groups exist from the start, in the order in which they are joined.
    const JOINED: [View; 9] = [
        View::WORLD,
        View::PP,
        View::DP_REPLICATE,
        View::DP_SHARD,
        View::CP,
        View::TP,
        View::BATCH,
        View::FSDP,
        View::LOSS,
    ];

    /// The place of one rank in a mesh, over any backend. Joins the groups of all dimensions and of all views with a
    /// name, in one order on all ranks; so all ranks call this together.
    ///
    /// # Errors
    /// What the backend's [`Backend::join`] says.
    pub fn new(grid: Grid, device: Device, backend: Arc<dyn Backend>, recorder: Recorder) -> Result<Self> {
        let backend = (grid.world_size() > 1).then_some(backend);
        let mesh = DeviceMesh(Arc::new(Inner { grid, device, recorder, backend, groups: Mutex::default() }));
        for view in Self::JOINED {
            mesh.group(view)?;
        }
        Ok(mesh)
    }

    /// The mesh of a single rank: every group is the identity.
    pub fn single(device: Device) -> Self {
        let (grid, recorder) = (Grid::single(), Recorder::default());
        DeviceMesh(Arc::new(Inner { grid, device, recorder, backend: None, groups: Mutex::default() }))
    }

    /// The device that this rank computes on.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// The recorder of all collectives of this rank.
    pub fn recorder(&self) -> &Recorder {
        &self.0.recorder
    }

    /// The group of this rank along a view; always the same one. A view of size 1 gives the identity.
    ///
    /// Groups of single dimensions and of views with a name are there already. Any other view's is joined when it is
    /// first asked for, so all its ranks must ask, and in the same order if there are several.
    ///
    /// # Errors
    /// [`Error::Connect`], where a group has to be joined first.
    pub fn group(&self, view: View) -> Result<Group> {
        self.join(view, self.size(view))
    }

    /// The group of this rank among `size` consecutive ranks of a view's group: with `size` 8, say, those of one machine.
    /// It is called `fsdp:8`. Joined when it is first asked for, as [`DeviceMesh::group`] says.
    ///
    /// # Errors
    /// [`Error::Connect`], also when `size` does not divide the size of the view.
    pub fn block(&self, view: View, size: usize) -> Result<Group> {
        self.join(view, size)
    }

    /// The groups of more than one rank that this rank has joined, by name.
    pub fn groups(&self) -> BTreeMap<String, Group> {
        let groups = self.0.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let several = groups.values().filter(|group| !group.is_single());
        several.map(|group| (group.name().to_owned(), group.clone())).collect()
    }

    fn join(&self, view: View, size: usize) -> Result<Group> {
        let mut groups = self.0.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get(&(view, size)) {
            return Ok(group.clone());
        }
        let (all, index) = (self.ranks(view), self.index(view));
        let name = if size == all.len() { view.name() } else { format!("{}:{size}", view.name()).into() };
        let divides = size > 0 && all.len().is_multiple_of(size);
        let members = match divides {
            true => Members::new(&name, &all[index / size * size..][..size], index % size),
            false => None,
        };
        let members = members.ok_or_else(|| Error::Connect {
            group: name.into_owned(),
            rank: self.rank(),
            source: format!("{all:?} cannot be divided into groups of {size} distinct ranks").into(),
        })?;
        let transport = match &self.0.backend {
            Some(backend) if members.size() > 1 => Some(backend.join(&members)?),
            _ => None,
        };
        let group = Group::new(members, self.0.device, transport, self.0.recorder.clone());
        groups.insert((view, size), group.clone());
        Ok(group)
    }

    /// Tells the other ranks that this one gives up and why, so that whoever waits for it gets
    /// [`Error::PeerFailed`] with these words. The backends' `run` functions do so for a body that fails.
    pub fn fail(&self, reason: &str) {
        if let Some(backend) = &self.0.backend {
            backend.fail(self.rank(), reason);
        }
    }

    /// The group of all ranks.
    pub fn world(&self) -> Group {
        self.group(View::WORLD).expect("the world's group is joined when the mesh is made, and needs no backend alone")
    }
}

impl Mesh for DeviceMesh {
    fn degrees(&self) -> Degrees {
        self.0.grid.degrees()
    }

    fn rank(&self) -> usize {
        self.0.grid.rank()
    }
}
