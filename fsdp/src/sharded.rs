//! What runs around the forward and backward of a unit.

use std::fmt;
use std::sync::Arc;

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_ext::hooks;
use ferrotitan_nn::{Batch, Layer, Parameter, Result, Seam};
use tch::Tensor;

use crate::engine::{Engine, Use};
use crate::error::Context as _;

/// Runs computations with a unit's parameters gathered, forward and backward.
#[derive(Clone)]
pub(crate) struct Gathering {
    pub(crate) engine: Arc<Engine>,
    pub(crate) used: Use,
    /// Whether the computation is the unit's first, with whose backward that of the unit ends.
    pub(crate) first: bool,
}

impl fmt::Debug for Gathering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gathering").field("used", &self.used).field("first", &self.first).finish_non_exhaustive()
    }
}

impl Gathering {
    /// Runs `compute` on `x`, cast to the unit's compute dtype.
    pub(crate) fn run(&self, x: &Tensor, compute: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let is_tracked = autograd::is_grad_enabled();
        self.engine.before_forward(&self.used, is_tracked)?;
        let mut x = self.cast(x)?;
        if self.first && is_tracked && x.requires_grad() {
            let boundary = Boundary(self.clone());
            x = autograd::apply(boundary, &[&x]).map_err(crate::Error::from)?.pop().unwrap_or(x);
        }
        let y = compute(&x)?;
        let has_backward = is_tracked && y.requires_grad();
        if has_backward {
            let this = self.clone();
            let before = move |_: &Tensor| {
                this.engine.before_backward(&this.used)?;
                Ok(None)
            };
            hooks::on_gradient(&y, before).map_err(crate::Error::from)?;
        }
        self.engine.after_forward(&self.used, has_backward)?;
        Ok(y)
    }

    fn cast(&self, x: &Tensor) -> crate::Result<Tensor> {
        let kind = match self.engine.options().cast_inputs {
            true => self.engine.state().units[self.used.unit].compute_kind(),
            false => None,
        };
        match kind {
            Some(kind) if x.is_floating_point() && x.kind() != kind => {
                x.f_to_kind(kind).context("casting a unit's input")
            }
            _ => Ok(x.shallow_clone()),
        }
    }
}

/// The identity at a unit's input. Its backward comes when the unit's is over: every node of the unit was made after it,
/// and the engine runs later nodes first, nodes that accumulate gradients before all others.
struct Boundary(Gathering);

impl Function for Boundary {
    fn forward(&mut self, _context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        Ok(vec![inputs[0].shallow_clone()])
    }

    fn backward(
        &mut self,
        _context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        self.0.engine.after_backward(&self.0.used)?;
        Ok(upstream)
    }
}

/// A layer whose parameters are gathered while it runs.
#[derive(Debug)]
pub struct Sharded {
    pub(crate) inner: Box<dyn Layer>,
    pub(crate) gathering: Gathering,
}

impl Layer for Sharded {
    fn forward(&mut self, x: &Tensor, batch: &Batch) -> Result<Tensor> {
        let inner = &mut self.inner;
        self.gathering.run(x, |x| inner.forward(x, batch))
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.inner.parameters()
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        self.inner.seams()
    }
}

/// Parameters that are gathered for a computation of the caller's own: what [`Handle::unit`](crate::Handle::unit) gives.
#[derive(Debug, Clone)]
pub struct Unit(pub(crate) Gathering);

impl Unit {
    /// Runs `compute` on `x` while the unit's parameters are gathered, and arranges that they are for its backward.
    ///
    /// What the gradient depends on must come in by `x`, since the unit's backward counts as over once the gradient of
    /// `x` is complete; where `x` needs none, once the pass is finished.
    ///
    /// # Errors
    /// What `compute` gives; also when a parameter has no storage, or a rank fails.
    pub fn run(&self, x: &Tensor, compute: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        self.0.run(x, compute)
    }

    /// The unit's number, for [`Handle`](crate::Handle) and [`Event`](crate::Event).
    #[must_use]
    pub fn number(&self) -> usize {
        self.0.used.unit
    }
}
