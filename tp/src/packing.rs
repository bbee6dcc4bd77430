//! Activations in fewer bits, where their products take them so.

use std::sync::Arc;

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_nn::{Activation, Error, Gemm, Packed, Result};
use tch::Tensor;

use crate::crossing::Crossing;
use crate::error::carried;

/// This rank's part of an activation in the form in which all of these products take it from here on; none where they
/// take it as it is.
pub(crate) fn packed(activation: Activation, part: &Tensor, gemms: &mut [Arc<dyn Gemm>]) -> Result<Option<Packed>> {
    // Projections of one input cast it alike, if they do at all: the first one's codes serve all of them.
    let Some(packed) = gemms.first().map(|gemm| gemm.pack(activation, part)).transpose()?.flatten() else {
        return Ok(None);
    };
    let takers: Option<Vec<_>> = gemms.iter().map(|gemm| gemm.of_packed(activation, &packed)).collect();
    let Some(takers) = takers else { return Ok(None) };
    gemms.iter_mut().zip(takers).for_each(|(gemm, taker)| *gemm = taker);
    Ok(Some(packed))
}

/// The codes that [`packed`] gives, or the activation itself.
pub(crate) fn pack(activation: Activation, part: &Tensor, gemms: &mut [Arc<dyn Gemm>]) -> Result<Tensor> {
    Ok(packed(activation, part, gemms)?.map_or_else(|| part.shallow_clone(), |packed| packed.codes))
}

/// The whole sequences of which `x` is this rank's share, read from codes; differentiable in `x`, as a gather is.
pub(crate) fn enter_packed(crossing: Crossing, packed: Packed, x: &Tensor) -> Result<Tensor> {
    let mut outputs = autograd::apply(EnterPacked { crossing, packed }, &[x])?;
    outputs.pop().ok_or_else(|| Error::Config("a gather gave no output".into()))
}

struct EnterPacked {
    crossing: Crossing,
    packed: Packed,
}

impl Function for EnterPacked {
    fn forward(&mut self, _context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        let codes = self.crossing.enter_start(&self.packed.codes)?.wait().map_err(carried("entering"))?;
        let whole = Packed { codes, scale: self.packed.scale.shallow_clone() };
        Ok(vec![whole.read(inputs[0].kind())?])
    }

    fn backward(
        &mut self,
        _context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(Some(gradient)) = upstream.into_iter().next() else { return Ok(vec![None]) };
        Ok(vec![Some(self.crossing.leave_start(&gradient)?.wait().map_err(carried("leaving"))?)])
    }
}
