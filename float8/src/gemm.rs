//! The three products of a projection, in eight bits.

use std::sync::Arc;

use ferrotitan_nn::{Gemm, Native};
use tch::Tensor;

use crate::cast::{Quantized, quantize_blocks, with_scale};
use crate::error::Context as _;
use crate::product::multiply;
use crate::recipe::{Axis, Product, Sharing};
use crate::scale::{amax, amax_of_rows, scale_for};
use crate::site::Site;
use crate::{Format, Operand, Recipe, Result};

/// The three products of one projection by a [`Recipe`].
///
/// Operands come in the dtype that the model computes in, and are cast anew for each product: equal operands give equal
/// results to the bit, also when activation checkpointing computes them again. Leading axes of inputs and gradients are
/// tokens. An operand with a NaN or an infinity is an error that names the weight; on a GPU, where looking would mean
/// waiting, the result is NaN, and [`Handle::finish_gradients`](crate::Handle::finish_gradients) names the weight.
#[derive(Debug, Clone)]
pub struct Float8Gemm(pub(crate) Arc<Site>);

impl Float8Gemm {
    /// The recipe.
    #[must_use]
    pub fn recipe(&self) -> Recipe {
        self.0.settings.recipe
    }

    /// `left` and `right` as the product multiplies them: none where the recipe leaves it alone.
    fn multiplied(&self, product: Product, left: &Tensor, right: &Tensor) -> Result<Option<Tensor>> {
        let settings = &self.0.settings;
        let Some([left_cast, right_cast]) = settings.recipe.casts(product) else { return Ok(None) };
        let [left_is, right_is] = product.operands();
        let a = self.quantized(left_is, left_cast, left, product.summed())?;
        let b = self.quantized(right_is, right_cast, right, product.summed())?;
        // As in TorchTitan, what is summed up again (gradients) is not summed with fewer bits.
        let fast = product == Product::Output;
        multiply(&a, &b, left.kind(), fast, settings.emulate).map(Some)
    }

    /// An operand as a matrix whose last axis is summed over.
    fn quantized(
        &self,
        operand: Operand,
        (format, sharing): (Format, Sharing),
        x: &Tensor,
        summed: Axis,
    ) -> Result<Quantized> {
        let site = &self.0;
        let mut matrix = by_features(x)?;
        if operand.axes()[0] == summed {
            matrix = matrix.f_tr().context("an operand")?;
        }
        match sharing {
            Sharing::Tensor => with_scale(&matrix, &site.scale_of(operand, &matrix, format)?, format),
            Sharing::Rows => {
                let amax = site.maximum(operand, amax_of_rows(&matrix)?, &[summed])?;
                with_scale(&matrix, &scale_for(&amax, format, site.settings.power_of_two)?, format)
            }
            Sharing::Blocks => {
                site.note(operand, &amax(&matrix)?)?;
                quantize_blocks(&matrix, format)
            }
        }
    }
}

impl Gemm for Float8Gemm {
    fn output(&self, x: &Tensor, weight: &Tensor) -> ferrotitan_nn::Result<Tensor> {
        match self.multiplied(Product::Output, x, weight)? {
            Some(product) => Ok(with_leading_axes_of(x, &product)?),
            None => Native.output(x, weight),
        }
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> ferrotitan_nn::Result<Tensor> {
        match self.multiplied(Product::InputGradient, dy, weight)? {
            Some(product) => Ok(with_leading_axes_of(dy, &product)?),
            None => Native.input_gradient(dy, weight),
        }
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> ferrotitan_nn::Result<Option<Tensor>> {
        match self.multiplied(Product::WeightGradient, dy, x)? {
            Some(product) => Ok(Some(product)),
            None => Native.weight_gradient(dy, x, weight),
        }
    }
}

/// `[…, features]` as `[tokens, features]`. Tokens are counted, since a rank may hold none of the features.
fn by_features(x: &Tensor) -> Result<Tensor> {
    let shape = x.size();
    let (features, leading) = shape.split_last().map_or((1, &[][..]), |(&last, leading)| (last, leading));
    x.f_reshape([leading.iter().product::<i64>(), features]).context("an operand")
}

/// `[tokens, features]` with the leading axes of `x` for tokens.
fn with_leading_axes_of(x: &Tensor, product: &Tensor) -> Result<Tensor> {
    let mut shape = x.size();
    if let (Some(last), Some(&features)) = (shape.last_mut(), product.size().last()) {
        *last = features;
    }
    product.f_reshape(shape).context("a product")
}
