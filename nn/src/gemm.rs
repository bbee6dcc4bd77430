//! The seam at a projection's three matrix products.

use std::fmt::Debug;
use std::sync::Arc;

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use tch::Tensor;

use crate::error::Context as _;
use crate::{Error, Result};

/// The three products of one projection `y = x wᵀ`, with `x` `[…, in]`, `w` `[out, in]` and `y` `[…, out]`.
///
/// Whoever wants other arithmetic (Float8), another moment (a pipeline that defers weight gradients), or another order
/// (chunks that overlap with communication) implements this; [`differentiable`] makes one differentiable function of the
/// three.
pub trait Gemm: Debug + Send + Sync {
    /// `y = x wᵀ`.
    ///
    /// # Errors
    /// When the product cannot be computed.
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor>;

    /// `dx = dy w`.
    ///
    /// # Errors
    /// When the product cannot be computed.
    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor>;

    /// `dw = dyᵀ x`, summed over all leading axes. `None` when it will be accumulated into the weight's gradient at
    /// another time.
    ///
    /// # Errors
    /// When the product cannot be computed.
    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>>;

    /// Whether the three are libtorch's own, so that its fused, differentiable product can stand in for them.
    fn is_native(&self) -> bool {
        false
    }
}

/// libtorch's products in the operands' dtype.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

impl Gemm for Native {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        x.f_linear(weight, None::<&Tensor>).context("projection")
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
        dy.f_matmul(weight).context("input gradient of a projection")
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, _weight: &Tensor) -> Result<Option<Tensor>> {
        // The number of rows is counted, since a rank may hold no feature of an axis that others hold.
        let rows = |t: &Tensor| match t.size().split_last() {
            Some((&features, leading)) => t.f_reshape([leading.iter().product(), features]),
            None => t.f_reshape([1, 1]),
        };
        let product = rows(dy).and_then(|dy| dy.f_tr()?.f_mm(&rows(x)?));
        product.map(Some).context("weight gradient of a projection")
    }

    fn is_native(&self) -> bool {
        true
    }
}

/// `y = x wᵀ`, differentiable, by the given products.
///
/// # Errors
/// When the product cannot be computed.
pub fn project(gemm: &Arc<dyn Gemm>, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    if gemm.is_native() { gemm.output(x, weight) } else { differentiable(Arc::clone(gemm), x, weight) }
}

/// One differentiable function of the three products of `gemm`.
///
/// # Errors
/// When the product cannot be computed.
pub fn differentiable(gemm: Arc<dyn Gemm>, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut outputs = autograd::apply(Products(gemm), &[x, weight])?;
    outputs.pop().ok_or_else(|| Error::Config("a projection gave no output".into()))
}

struct Products(Arc<dyn Gemm>);

impl Function for Products {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        context.save(inputs);
        Ok(vec![self.0.output(&inputs[0], &inputs[1])?])
    }

    fn backward(
        &mut self,
        context: &mut Context,
        gradients: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(Some(dy)) = gradients.into_iter().next() else { return Ok(vec![None, None]) };
        let saved = context.saved()?;
        let (x, weight) = (&saved[0], &saved[1]);
        let dx = match context.needs_input_grad(0) {
            true => Some(self.0.input_gradient(&dy, weight)?),
            false => None,
        };
        let dw = match context.needs_input_grad(1) {
            true => self.0.weight_gradient(&dy, x, weight)?,
            false => None,
        };
        Ok(vec![dx, dw])
    }
}
