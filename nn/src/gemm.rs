//! The seam at a projection's three matrix products.

use std::fmt::Debug;
use std::sync::Arc;

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use tch::{Kind, Tensor};

use crate::error::Context as _;
use crate::feed_forward::exactly;
use crate::kept::{self, Operation, kept};
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

    /// An activation as it travels between the ranks that share the projection, of which `part` is this rank's part: cast
    /// as the products would cast the whole, so that both ways give the same. They do it together. `None`, as ever
    /// unless somebody says otherwise: it travels as it is.
    ///
    /// # Errors
    /// When it cannot be cast, or the ranks cannot agree on a scale.
    fn pack(&self, _activation: Activation, _part: &Tensor) -> Result<Option<Packed>> {
        Ok(None)
    }

    /// The products that take, in the place of an activation, its codes (or the numbers that they stand for), packed by
    /// this or by another projection of the same input. `None` where this one needs it as it was.
    ///
    /// Whoever wraps products of another `Gemm` hands both calls on, and wraps what this gives.
    fn of_packed(&self, _activation: Activation, _packed: &Packed) -> Option<Arc<dyn Gemm>> {
        None
    }
}

/// An operand that may travel between ranks before it is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x`.
    Input,
    /// `dy`.
    Gradient,
}

/// A rank's part of an activation, in fewer bits.
#[derive(Debug)]
pub struct Packed {
    /// The part as it travels, in its own shape.
    pub codes: Tensor,
    /// What the activation was multiplied by: fp32, a scalar, the same on all ranks.
    pub scale: Tensor,
}

impl Packed {
    /// The numbers that the codes stand for.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn read(&self, kind: Kind) -> Result<Tensor> {
        let codes = self.codes.f_to_kind(Kind::Float);
        let numbers = codes.and_then(|codes| codes.f_mul(&self.scale.f_reciprocal()?)?.f_to_kind(kind));
        numbers.context("an activation in codes")
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
    // libtorch's function would not let its output be kept.
    match gemm.is_native() && !kept::is_running() {
        true => gemm.output(x, weight),
        false => differentiable(Arc::clone(gemm), x, weight),
    }
}

/// One differentiable function of the three products of `gemm`.
///
/// # Errors
/// When the product cannot be computed.
pub fn differentiable(gemm: Arc<dyn Gemm>, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut outputs = autograd::apply(Products(gemm), &[x, weight])?;
    outputs.pop().ok_or_else(|| Error::Config("a projection gave no output".into()))
}

/// `x wᵀ` in the forward of an autograd function, where [`kept`] may have it already.
///
/// # Errors
/// When the product cannot be computed.
pub fn kept_output(gemm: &dyn Gemm, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    exactly(kept(Operation::Product, || Ok::<_, Error>(vec![gemm.output(x, weight)?]))?).map(|[output]| output)
}

struct Products(Arc<dyn Gemm>);

impl Function for Products {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        context.save(inputs);
        Ok(vec![kept_output(&*self.0, &inputs[0], &inputs[1])?])
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
