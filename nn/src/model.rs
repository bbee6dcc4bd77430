//! A model: a list of named layers, and what is done to it before it has storage.

use ferrotitan_mesh::Mesh;
use tch::{Device, Kind, Tensor};

use crate::{Batch, Error, NamedLayer, Parameter, Result, Seam};

/// A list of layers, each fed with its predecessor's output; the first is fed with the tokens.
#[derive(Debug)]
pub struct Model {
    layers: Vec<NamedLayer>,
}

/// A feature that attaches to a model: it replaces seams, wraps layers, or changes parameters' layouts.
///
/// Transforms run before the model has storage.
pub trait Transform {
    /// Attaches the feature.
    ///
    /// # Errors
    /// When the model does not admit it.
    fn apply(&self, model: &mut Model, mesh: &dyn Mesh) -> Result<()>;
}

/// How a model comes into being.
#[derive(Debug, Clone, Copy)]
pub struct Materialize {
    /// Decides the initial values, together with each parameter's name.
    pub seed: u64,
    /// Dtype of the parameters, hence of the optimizer's state.
    pub kind: Kind,
    /// Dtype that forward passes compute in, where it is another.
    pub compute: Option<Kind>,
    /// Where the parameters live.
    pub device: Device,
}

impl Model {
    /// Of layers in order.
    #[must_use]
    pub fn new(layers: Vec<NamedLayer>) -> Self {
        Self { layers }
    }

    /// The layers.
    #[must_use]
    pub fn layers(&self) -> &[NamedLayer] {
        &self.layers
    }

    /// The layers, to wrap, replace or remove some.
    pub fn layers_mut(&mut self) -> &mut Vec<NamedLayer> {
        &mut self.layers
    }

    /// Runs all layers: the sum of the losses where the batch has labels, else the logits.
    ///
    /// # Errors
    /// What a layer's forward gives.
    pub fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.forward_from(&batch.tokens, batch)
    }

    /// The same from the activations `x` that the layers before these gave: what a pipeline stage runs.
    ///
    /// # Errors
    /// What a layer's forward gives.
    pub fn forward_from(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        let mut x = x.shallow_clone();
        for NamedLayer { name, layer } in &mut self.layers {
            let output = layer.forward(&x, batch);
            x = output.map_err(|source| Error::Other { context: format!("layer {name}"), source: source.into() })?;
        }
        Ok(x)
    }

    /// Every parameter once, in the layers' order; a tied weight where it is first met.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut parameters: Vec<Parameter> = Vec::new();
        for parameter in self.layers.iter().flat_map(|named| named.layer.parameters()) {
            if !parameters.iter().any(|known| known.is(&parameter)) {
                parameters.push(parameter);
            }
        }
        parameters
    }

    /// Every seam with its full name, in the layers' order.
    pub fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        self.layers.iter_mut().flat_map(|named| named.layer.seams()).collect()
    }

    /// Allocates this rank's shards and fills them.
    ///
    /// # Errors
    /// When libtorch cannot allocate one.
    pub fn materialize(&mut self, how: &Materialize, mesh: &dyn Mesh) -> Result<()> {
        for parameter in self.parameters() {
            parameter.materialize(how.seed, how.kind, how.device, mesh)?;
            parameter.set_compute_kind(how.compute);
        }
        Ok(())
    }
}
