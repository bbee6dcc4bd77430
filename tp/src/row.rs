//! Projections split by their inputs.

use std::slice;
use std::sync::Arc;

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_nn::{Activation, Gemm, Linear, Operation, Projection, Result, kept};
use tch::Tensor;

use crate::crossing::{Crossing, Residual};
use crate::packing::pack;

/// Every rank multiplies its own input features, `X_i W_iᵀ`, and the results are summed.
#[derive(Debug)]
pub(crate) struct RowParallel {
    projections: Vec<Projection>,
    residual: Residual,
}

impl RowParallel {
    pub(crate) fn new(projections: Vec<Projection>, residual: Residual) -> Self {
        Self { projections, residual }
    }
}

impl Linear for RowParallel {
    /// `x` `[batch, sequence, in_i]` in, the residual stream out.
    fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let mut outputs = Vec::new();
        for Projection { weight, gemm } in &self.projections {
            let row = Row { gemm: Arc::clone(gemm), crossing: self.residual.crossing() };
            outputs.append(&mut autograd::apply(row, &[x, &weight.value()?])?);
        }
        Ok(outputs)
    }

    fn projections(&self) -> &[Projection] {
        &self.projections
    }

    fn projections_mut(&mut self) -> &mut Vec<Projection> {
        &mut self.projections
    }
}

/// The input and the weight in, the output out.
struct Row {
    gemm: Arc<dyn Gemm>,
    crossing: Crossing,
}

impl Function for Row {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        // The features do not travel, but they may come in pieces, and are read again in the backward pass.
        let x = pack(Activation::Input, &inputs[0], slice::from_mut(&mut self.gemm))?;
        context.save(&[x.shallow_clone(), inputs[1].shallow_clone()]);
        kept(Operation::SummedProduct, || Ok(vec![self.crossing.then_leave(&x, |x| self.gemm.output(x, &inputs[1]))?]))
    }

    fn backward(
        &mut self,
        context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(Some(dy)) = upstream.into_iter().next() else { return Ok(vec![None, None]) };
        let saved = context.saved()?;
        let (x, weight) = (&saved[0], &saved[1]);
        let needs_input = context.needs_input_grad(0);
        let mut gemm = Arc::clone(&self.gemm);
        let dy = self.crossing.pack(Activation::Gradient, &dy, slice::from_mut(&mut gemm))?;
        // The gathered gradient comes along as the last of the products: the weight gradient needs it whole.
        let mut products = self.crossing.enter_then(&dy, |dy| {
            let mut products = Vec::new();
            if needs_input {
                products.push(gemm.input_gradient(dy, weight)?);
            }
            products.push(dy.shallow_clone());
            Ok(products)
        })?;
        let whole = products.pop();
        let dw = match whole {
            Some(dy) if context.needs_input_grad(1) => gemm.weight_gradient(&dy, x, weight)?,
            _ => None,
        };
        Ok(vec![products.pop(), dw])
    }
}
