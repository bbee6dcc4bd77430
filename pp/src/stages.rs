//! Which stage a layer belongs to, and which rank holds it.

use ferrotitan_mesh::{Dim, Mesh, View};
use ferrotitan_nn::{Model, Parameter, Transform};
use ferrotitan_schedule::Schedule;

use crate::{Error, Result, Split};

/// A stage that this rank holds: a range of the model's layers.
#[derive(Debug)]
pub struct Stage {
    /// Its number, from 0 (the embedding).
    pub index: usize,
    /// Its layers.
    pub model: Model,
}

/// The layers of every stage, and the rank that holds it.
///
/// Of the transforms of a model this one comes first: it drops the layers of other ranks, which then are never
/// allocated. The others see one model of all layers that this rank has; [`stages`](Self::stages) cuts it up at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    schedule: String,
    /// The names of each stage's layers.
    layers: Vec<Vec<String>>,
    /// The rank of each stage.
    placement: Vec<usize>,
    ranks: usize,
}

impl Partition {
    /// Cuts `layers`, the names of a model's layers in order, into the stages of a schedule.
    ///
    /// # Errors
    /// What [`Split::parts`] says.
    pub fn new(layers: &[&str], split: &Split, schedule: &Schedule) -> Result<Self> {
        let parts = split.parts(layers, schedule.stages())?;
        let names = |part: std::ops::Range<usize>| layers[part].iter().map(ToString::to_string).collect();
        Ok(Self {
            schedule: schedule.name.clone(),
            layers: parts.into_iter().map(names).collect(),
            placement: schedule.placement.clone(),
            ranks: schedule.ranks.len(),
        })
    }

    /// [`Partition::new`] for the layers of a model.
    ///
    /// # Errors
    /// As there.
    pub fn of(model: &Model, split: &Split, schedule: &Schedule) -> Result<Self> {
        Self::new(&names(model), split, schedule)
    }

    /// The names of each stage's layers, in order.
    #[must_use]
    pub fn layers(&self) -> &[Vec<String>] {
        &self.layers
    }

    /// The stage of a layer.
    #[must_use]
    pub fn stage_of(&self, layer: &str) -> Option<usize> {
        self.layers.iter().position(|names| names.iter().any(|name| name == layer))
    }

    /// Drops the layers of other ranks. A parameter that stages of several ranks hold is told so
    /// ([`held_by_stages`](ferrotitan_mesh::Layout::held_by_stages)): it starts equal on all of them, since values
    /// depend on its name alone, gets the sum of their gradients, and is owned by the first.
    ///
    /// # Errors
    /// [`Error::Ranks`] when the mesh has another number of ranks along pp than the schedule; [`Error::Split`] when the
    /// model has other layers than this was made for.
    pub fn keep(&self, model: &mut Model, mesh: &dyn Mesh) -> Result<()> {
        let found = mesh.size(View::PP);
        if found != self.ranks {
            return Err(Error::Ranks { schedule: self.schedule.clone(), needed: self.ranks, found });
        }
        let given = names(model);
        let expected: Vec<&str> = self.layers.iter().flatten().map(String::as_str).collect();
        if given != expected {
            let reason =
                format!("it has the layers {}, but the stages are of {}", given.join(", "), expected.join(", "));
            return Err(Error::Split { reasons: vec![reason] });
        }
        for parameter in model.parameters() {
            let holders = self.holders(model, &parameter);
            if holders.len() > 1 {
                parameter.set_layout(parameter.layout().held_by_stages(&holders));
            }
        }
        let here = mesh.coordinate(Dim::Pp);
        model.layers_mut().retain(|named| self.rank_of(&named.name) == Some(here));
        Ok(())
    }

    /// Cuts what [`keep`](Self::keep) has left, and other transforms have wrapped, into this rank's stages.
    #[must_use]
    pub fn stages(&self, mut model: Model) -> Vec<Stage> {
        let mut stages = Vec::new();
        for (index, names) in self.layers.iter().enumerate() {
            let is_here = |name: &String| names.contains(name);
            let (own, rest) = std::mem::take(model.layers_mut()).into_iter().partition(|named| is_here(&named.name));
            *model.layers_mut() = rest;
            let own = Model::new(own);
            if !own.layers().is_empty() {
                stages.push(Stage { index, model: own });
            }
        }
        stages
    }

    /// The ranks whose layers have a parameter, that of the lowest stage first.
    fn holders(&self, model: &Model, parameter: &Parameter) -> Vec<usize> {
        let mut holders = Vec::new();
        for named in model.layers() {
            if named.layer.parameters().iter().any(|own| own.is(parameter))
                && let Some(rank) = self.rank_of(&named.name)
                && !holders.contains(&rank)
            {
                holders.push(rank);
            }
        }
        holders
    }

    fn rank_of(&self, layer: &str) -> Option<usize> {
        self.placement.get(self.stage_of(layer)?).copied()
    }
}

impl Transform for Partition {
    fn apply(&self, model: &mut Model, mesh: &dyn Mesh) -> ferrotitan_nn::Result<()> {
        Ok(self.keep(model, mesh)?)
    }
}

fn names(model: &Model) -> Vec<&str> {
    model.layers().iter().map(|named| named.name.as_str()).collect()
}
