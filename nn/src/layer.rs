//! The seam between a model and whatever wraps, moves or replaces parts of it.

use std::fmt::Debug;

use tch::Tensor;

use crate::{Attention, Batch, Linear, Loss, Parameter, Result};

/// Activations in, activations out. A model is a list of named layers.
///
/// Forward takes `&mut self`, since a wrapper keeps account of what it gathered; a layer is used by one rank alone.
pub trait Layer: Debug + Send {
    /// Computes the layer's output. The first layer of a model is given the tokens, every other its predecessor's output.
    ///
    /// # Errors
    /// When a parameter has no storage, the shapes do not fit, or libtorch fails.
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor>;

    /// Every parameter of the layer, each once.
    fn parameters(&self) -> Vec<Parameter>;

    /// The places where a feature can attach inside the layer, with their full names.
    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        Vec::new()
    }
}

/// A replaceable part of a layer.
#[derive(Debug)]
pub enum Seam<'a> {
    /// One or several projections of one input.
    Linear(&'a mut Box<dyn Linear>),
    /// Attention proper, between the projections.
    Attention(&'a mut Box<dyn Attention>),
    /// The loss, with the head's projection.
    Loss(&'a mut Box<dyn Loss>),
}

/// A layer and its name in the model, such as `layers.0`.
#[derive(Debug)]
pub struct NamedLayer {
    /// Prefix of its parameters' names.
    pub name: String,
    /// The layer.
    pub layer: Box<dyn Layer>,
}

impl NamedLayer {
    /// Names a layer.
    pub fn new(name: impl Into<String>, layer: impl Layer + 'static) -> Self {
        Self { name: name.into(), layer: Box::new(layer) }
    }

    /// Puts another layer in the place of this one, usually around it.
    pub fn wrap(&mut self, wrapper: impl FnOnce(Box<dyn Layer>) -> Box<dyn Layer>) {
        let layer = std::mem::replace(&mut self.layer, Box::new(Moved));
        self.layer = wrapper(layer);
    }
}

/// Stands where a layer is being wrapped.
#[derive(Debug)]
struct Moved;

impl Layer for Moved {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }

    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }
}
