//! Weight gradients at another time than input gradients.
//!
//! Zero-bubble schedules (Qi et al. 2023, <https://arxiv.org/abs/2401.10241>) split a backward in two. Nothing is cut out
//! of the autograd graph for that: the products of a projection are the [`Gemm`] seam's, and the wrapper here puts the
//! weight's product by instead of computing it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrotitan_ext::autograd;
use ferrotitan_nn::{Activation, Gemm, Model, Packed, Seam};
use tch::Tensor;

use crate::Result;
use crate::error::Context as _;

/// Puts off the weight gradients of the projections that it is attached to, while it is asked to. Clones are the same.
///
/// Weights that are in no projection (norms, embeddings) get their gradients in the backward pass as ever; they cost
/// little. So do those of a loss that computes its gradients in the forward pass.
#[derive(Clone, Debug, Default)]
pub struct Deferral(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    is_deferring: bool,
    queue: Vec<Product>,
}

impl Deferral {
    /// Puts itself around the products of all projections of a model, whatever computes them: after tensor parallelism
    /// and Float8.
    pub fn attach(&self, model: &mut Model) {
        for (_, seam) in model.seams() {
            let Seam::Linear(linear) = seam else { continue };
            for projection in linear.projections_mut() {
                let inner = Arc::clone(&projection.gemm);
                projection.gemm = Arc::new(Deferring { inner, deferral: self.clone() });
            }
        }
    }

    /// Runs a backward pass without its weight gradients, and gives what is left to do with its result.
    pub fn defer<T>(&self, backward: impl FnOnce() -> T) -> (T, Deferred) {
        self.state().is_deferring = true;
        let result = backward();
        let mut state = self.state();
        state.is_deferring = false;
        (result, Deferred(std::mem::take(&mut state.queue)))
    }

    // A panic while the lock was held cannot leave a half-written state: every write is one assignment or one push.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Weight gradients that have been put off, with what they are computed from.
#[derive(Debug, Default)]
#[must_use = "the weight gradients are lost unless it is run"]
pub struct Deferred(Vec<Product>);

impl Deferred {
    /// How many weights' gradients are to be computed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing was put off.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Computes them one by one and adds them to the weights' gradients, as a backward pass would have.
    ///
    /// # Errors
    /// When a product cannot be computed, or a hook of a weight fails.
    pub fn run(self) -> Result<()> {
        self.0.into_iter().try_for_each(Product::run)
    }
}

/// One weight gradient to be computed.
struct Product {
    gemm: Arc<dyn Gemm>,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
}

impl fmt::Debug for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Product").field("gemm", &self.gemm).field("weight", &self.weight.size()).finish_non_exhaustive()
    }
}

impl Product {
    fn run(self) -> Result<()> {
        let Self { gemm, dy, x, weight } = self;
        let gradient = tch::no_grad(|| gemm.weight_gradient(&dy, &x, &weight))?;
        drop((dy, x));
        // By the engine, since a cast or a sum over ranks may lie between what the product used and the parameter.
        match gradient {
            Some(gradient) => Ok(autograd::backward(&[weight], &[Some(gradient)], false)?),
            None => Ok(()),
        }
    }
}

/// The products of `inner`, of which that of the weight gradient may come later.
#[derive(Debug)]
struct Deferring {
    inner: Arc<dyn Gemm>,
    deferral: Deferral,
}

impl Gemm for Deferring {
    fn output(&self, x: &Tensor, weight: &Tensor) -> ferrotitan_nn::Result<Tensor> {
        self.inner.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> ferrotitan_nn::Result<Tensor> {
        self.inner.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> ferrotitan_nn::Result<Option<Tensor>> {
        let mut state = self.deferral.state();
        if !state.is_deferring {
            drop(state);
            return self.inner.weight_gradient(dy, x, weight);
        }
        state.queue.push(Product {
            gemm: Arc::clone(&self.inner),
            // The very tensor, not a view: libtorch reuses the memory of a gradient that nobody else holds.
            dy: dy.shallow_clone(),
            // Without its graph, which would keep the nodes before it.
            x: x.f_detach().context("deferring a weight gradient")?,
            weight: weight.shallow_clone(),
        });
        Ok(None)
    }

    fn pack(&self, activation: Activation, part: &Tensor) -> ferrotitan_nn::Result<Option<Packed>> {
        self.inner.pack(activation, part)
    }

    fn of_packed(&self, activation: Activation, packed: &Packed) -> Option<Arc<dyn Gemm>> {
        let inner = self.inner.of_packed(activation, packed)?;
        Some(Arc::new(Self { inner, deferral: self.deferral.clone() }))
    }
}
