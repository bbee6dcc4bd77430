//! Projections split by their outputs.

use std::sync::Arc;

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_nn::{Activation, Gemm, Linear, Projection, Result, kept_output};
use tch::Tensor;

use crate::crossing::{Crossing, Residual};
use crate::error::{Context as _, carried};

/// Every rank computes its own outputs of whole sequences: `Y_i = X W_iᵀ`.
///
/// The input is gathered once for all projections. With sequence parallelism the gathered input is not kept: backward
/// keeps this rank's share and gathers it again, while the input gradient is computed (as Megatron-LM does). A share that
/// travels in fewer bits is kept in those.
#[derive(Debug)]
pub(crate) struct ColumnParallel {
    projections: Vec<Projection>,
    residual: Residual,
}

impl ColumnParallel {
    pub(crate) fn new(projections: Vec<Projection>, residual: Residual) -> Self {
        Self { projections, residual }
    }
}

impl Linear for ColumnParallel {
    /// `x` of the residual stream in, `[batch, sequence, out_i]` out.
    fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let gemms = self.projections.iter().map(|projection| Arc::clone(&projection.gemm)).collect();
        let weights = self.projections.iter().map(|p| p.weight.value()).collect::<Result<Vec<_>>>()?;
        let inputs: Vec<&Tensor> = std::iter::once(x).chain(&weights).collect();
        Ok(autograd::apply(Column { gemms, crossing: self.residual.crossing() }, &inputs)?)
    }

    fn projections(&self) -> &[Projection] {
        &self.projections
    }

    fn projections_mut(&mut self) -> &mut Vec<Projection> {
        &mut self.projections
    }
}

/// The input and each projection's weight in, each projection's output out.
struct Column {
    gemms: Vec<Arc<dyn Gemm>>,
    crossing: Crossing,
}

impl Function for Column {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        let (x, weights) = (&inputs[0], &inputs[1..]);
        let x = self.crossing.pack(Activation::Input, x, &mut self.gemms)?;
        context.save(&[x.shallow_clone()]);
        context.save(weights);
        let products =
            |x: &Tensor| self.gemms.iter().zip(weights).map(|(gemm, weight)| kept_output(&**gemm, x, weight)).collect();
        Ok(self.crossing.enter_then(&x, products)?)
    }

    fn backward(
        &mut self,
        context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let saved = context.saved()?;
        let (x, weights) = (&saved[0], &saved[1..]);
        let products = || self.gemms.iter().zip(weights).zip(&upstream).enumerate();
        let needed = |index: usize| context.needs_input_grad(index + 1) && upstream[index].is_some();
        // The gather travels under the input gradient, and the input gradient's sum under the weight gradients.
        let arriving = match (0..weights.len()).any(needed) {
            true => Some(self.crossing.enter_start(x)?),
            false => None,
        };
        let mut dx: Option<Tensor> = None;
        if context.needs_input_grad(0) {
            for (_, ((gemm, weight), dy)) in products() {
                let Some(dy) = dy else { continue };
                let part = gemm.input_gradient(dy, weight)?;
                dx = Some(match dx {
                    Some(mut sum) => sum.f_add_(&part).context("input gradient")?,
                    None => part,
                });
            }
        }
        let leaving = dx.map(|dx| self.crossing.leave_start(&dx)).transpose()?;
        let whole = arriving.map(|arriving| arriving.wait().map_err(carried("entering"))).transpose()?;
        let mut gradients = vec![None];
        for (index, ((gemm, weight), dy)) in products() {
            gradients.push(match (dy, &whole) {
                (Some(dy), Some(whole)) if needed(index) => gemm.weight_gradient(dy, whole, weight)?,
                _ => None,
            });
        }
        gradients[0] = leaving.map(|leaving| leaving.wait().map_err(carried("leaving"))).transpose()?;
        Ok(gradients)
    }
}
