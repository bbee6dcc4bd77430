//! Parameters: what is learned, where it lies, and how it comes into being.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrotitan_ext as ext;
use ferrotitan_mesh::rng::{Distribution, Stream};
use ferrotitan_mesh::{Layout, Mesh};
use rayon::prelude::*;
use tch::{Device, Kind, Tensor};

use crate::error::Context as _;
use crate::{Error, Result};

/// A learned tensor. Clones are the same parameter: a tied weight is one parameter that two modules hold.
///
/// A parameter is made without storage, given its [`Layout`] by whoever shards it, and then materialized: only this
/// rank's shard is ever allocated. From then on it has two faces:
/// - [`local`](Self::local), the shard that the optimizer updates and whose gradient it reads;
/// - [`value`](Self::value), what a forward pass computes with. Until something replaces it (a gathered copy, say),
///   that is the shard itself, cast to the compute dtype if one is set.
#[derive(Clone, Debug)]
pub struct Parameter(Arc<Inner>);

/// What is done to a parameter's value each time that a forward pass reads it; part of the graph.
pub type Reader = Arc<dyn Fn(Tensor) -> Result<Tensor> + Send + Sync>;

#[derive(Debug)]
struct Inner {
    name: String,
    init: Distribution,
    state: Mutex<State>,
}

struct State {
    layout: Layout,
    trainable: bool,
    local: Option<Tensor>,
    value: Option<Tensor>,
    compute: Option<Kind>,
    reader: Option<Reader>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut state = f.debug_struct("State");
        state.field("layout", &self.layout).field("trainable", &self.trainable).field("local", &self.local);
        state.field("value", &self.value).field("compute", &self.compute).finish_non_exhaustive()
    }
}

impl Parameter {
    /// A parameter of the global `shape`, on every rank, without storage.
    ///
    /// `name` is the full name, such as `layers.0.attention.wq.weight`: together with the seed it decides the initial
    /// values.
    #[must_use]
    pub fn new(name: impl Into<String>, shape: &[usize], init: Distribution) -> Self {
        let state = State {
            layout: Layout::replicated(shape),
            trainable: true,
            local: None,
            value: None,
            compute: None,
            reader: None,
        };
        Self(Arc::new(Inner { name: name.into(), init, state: Mutex::new(state) }))
    }

    /// The full name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How the initial values are drawn.
    #[must_use]
    pub fn init(&self) -> Distribution {
        self.0.init
    }

    /// Whether the two are one parameter.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// How the global tensor lies on the mesh.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.state().layout.clone()
    }

    /// Changes how the global tensor lies on the mesh. Takes effect when the parameter is materialized.
    pub fn set_layout(&self, layout: Layout) {
        self.state().layout = layout;
    }

    /// Whether it is trained. A frozen parameter has no gradient.
    #[must_use]
    pub fn is_trainable(&self) -> bool {
        self.state().trainable
    }

    /// Freezes or unfreezes it.
    pub fn set_trainable(&self, trainable: bool) {
        let mut state = self.state();
        state.trainable = trainable;
        if let Some(local) = &state.local {
            let _ = local.set_requires_grad(trainable);
        }
    }

    /// The dtype that a forward pass computes in, where it is not that of the shard.
    pub fn set_compute_kind(&self, kind: Option<Kind>) {
        self.state().compute = kind;
    }

    /// The dtype that [`set_compute_kind`](Self::set_compute_kind) set.
    #[must_use]
    pub fn compute_kind(&self) -> Option<Kind> {
        self.state().compute
    }

    /// This rank's shard: what the optimizer updates.
    ///
    /// # Errors
    /// Before it is materialized.
    pub fn local(&self) -> Result<Tensor> {
        self.state().local.as_ref().map(Tensor::shallow_clone).ok_or_else(|| self.not_materialized())
    }

    /// The tensor whose gradient a backward pass accumulates: the replacement if there is one, else the shard.
    ///
    /// # Errors
    /// Before it is materialized.
    pub fn leaf(&self) -> Result<Tensor> {
        let state = self.state();
        let leaf = state.value.as_ref().or(state.local.as_ref());
        leaf.map(Tensor::shallow_clone).ok_or_else(|| self.not_materialized())
    }

    /// What a forward pass computes with.
    ///
    /// # Errors
    /// Before it is materialized.
    pub fn value(&self) -> Result<Tensor> {
        let (compute, reader) = {
            let state = self.state();
            (state.compute, state.reader.clone())
        };
        let leaf = match reader {
            Some(read) => read(self.leaf()?)?,
            None => self.leaf()?,
        };
        match compute {
            // The cast is part of the graph: its backward returns the gradient to the leaf in the leaf's own dtype, in
            // which a reader then sums it.
            Some(kind) if kind != leaf.kind() => leaf.f_to_kind(kind).context("casting a parameter"),
            _ => Ok(leaf),
        }
    }

    /// Puts a function between the parameter and the forward passes that read it, before a cast to the compute dtype. An
    /// identity whose backward sums the gradient over a group is one: it completes the gradient of a weight that each
    /// rank applies to part of the tokens.
    pub fn set_reader(&self, reader: Option<Reader>) {
        self.state().reader = reader;
    }

    /// Replaces what forward passes compute with, or (`None`) takes the replacement back.
    pub fn set_value(&self, value: Option<Tensor>) {
        self.state().value = value;
    }

    /// The gradient of this rank's shard, if there is one.
    ///
    /// # Errors
    /// Before it is materialized.
    pub fn gradient(&self) -> Result<Option<Tensor>> {
        let gradient = self.local()?.grad();
        Ok(gradient.defined().then_some(gradient))
    }

    /// Drops the gradient, so that the next backward pass starts a new one.
    ///
    /// # Errors
    /// Before it is materialized.
    pub fn clear_gradient(&self) -> Result<()> {
        ext::autograd::set_gradient(&self.local()?, None)?;
        Ok(())
    }

    /// Sets the gradient of this rank's shard.
    ///
    /// # Errors
    /// Before it is materialized, or when shape or dtype are not the shard's.
    pub fn set_gradient(&self, gradient: Tensor) -> Result<()> {
        ext::autograd::set_gradient(&self.local()?, Some(&gradient))?;
        Ok(())
    }

    /// Allocates this rank's shard and fills it with its part of the global initial values.
    ///
    /// The values depend on the seed, the name and the global index of each element alone, so every layout holds parts
    /// of one and the same tensor, bit for bit. Does nothing where the shard exists already.
    ///
    /// # Errors
    /// When libtorch cannot allocate it.
    pub fn materialize(&self, seed: u64, kind: Kind, device: Device, mesh: &dyn Mesh) -> Result<()> {
        let mut state = self.state();
        if state.local.is_some() {
            return Ok(());
        }
        let region = state.layout.local_region(mesh);
        let shape: Vec<i64> = region.shape.iter().map(|&n| n as i64).collect();
        let local = Tensor::f_empty(&shape, (kind, device)).context("allocating a parameter")?;
        let stream = Stream::new(seed, &self.0.name);
        // A slab at a time, so that the double-precision draft stays small beside the shard.
        let rows = region.shape.first().copied().unwrap_or(1);
        let row: usize = region.shape.iter().skip(1).product();
        let slab = (SLAB / row.max(1)).max(1);
        let mut draft = Vec::new();
        for start in (0..rows).step_by(slab) {
            let mut part = region.clone();
            let count = slab.min(rows - start);
            if !part.shape.is_empty() {
                part.offset[0] += start;
                part.shape[0] = count;
            }
            draft.resize(count * row, 0.0);
            fill(&stream, self.0.init, state.layout.shape(), &part, &mut draft);
            let values = Tensor::from_slice(&draft);
            let mut target = match shape.is_empty() {
                true => local.shallow_clone(),
                false => local.narrow(0, start as i64, count as i64),
            };
            target.f_copy_(&values.view_as(&target)).context("initializing a parameter")?;
        }
        state.local = Some(local.set_requires_grad(state.trainable));
        Ok(())
    }

    fn not_materialized(&self) -> Error {
        Error::NotMaterialized { name: self.0.name.clone() }
    }

    // A panic while the lock was held cannot leave a half-written state: every write is one assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Elements of a parameter that are drawn at a time.
const SLAB: usize = 1 << 20;

/// Draws a region's values, its rows in parallel.
fn fill(stream: &Stream, init: Distribution, global: &[usize], region: &ferrotitan_mesh::Region, out: &mut [f64]) {
    let row: usize = region.shape.iter().skip(1).product();
    if region.shape.is_empty() || row == 0 || out.len() < 1 << 14 {
        return stream.fill_region(init, global, region, out);
    }
    let rows = 8192_usize.div_ceil(row);
    out.par_chunks_mut(rows * row).enumerate().for_each(|(chunk, out)| {
        let mut part = region.clone();
        part.offset[0] += chunk * rows;
        part.shape[0] = out.len() / row;
        stream.fill_region(init, global, &part, out);
    });
}
