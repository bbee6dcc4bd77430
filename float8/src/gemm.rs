//! The three products of a projection, in eight bits.

use std::sync::{Arc, Mutex, PoisonError};

use ferrotitan_nn::{Activation, Gemm, Native, Packed};
use tch::{Kind, Tensor};

use crate::cast::{Quantized, Scale, cast, quantize_blocks, with_scale};
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
///
/// An activation of one scale ([`Recipe::Tensorwise`]) may come packed, in codes that are multiplied as they are.
#[derive(Debug, Clone)]
pub struct Float8Gemm {
    site: Arc<Site>,
    /// By activation, the scale in which it comes packed, if it does.
    packed: [Option<Arc<Mutex<Tensor>>>; 2],
}

impl Float8Gemm {
    pub(crate) fn new(site: Arc<Site>) -> Self {
        Self { site, packed: [None, None] }
    }

    /// The recipe.
    #[must_use]
    pub fn recipe(&self) -> Recipe {
        self.site.settings.recipe
    }

    /// The scale of what comes in codes.
    fn scale_of_codes(&self, operand: Operand) -> Option<Tensor> {
        let scale = match operand {
            Operand::Input => self.packed[Activation::Input as usize].as_ref()?,
            Operand::Gradient => self.packed[Activation::Gradient as usize].as_ref()?,
            Operand::Weight => return None,
        };
        Some(scale.lock().unwrap_or_else(PoisonError::into_inner).shallow_clone())
    }

    /// `left` and `right` as the product multiplies them, in `kind`: none where the recipe leaves it alone.
    fn multiplied(&self, product: Product, left: &Tensor, right: &Tensor, kind: Kind) -> Result<Option<Tensor>> {
        let settings = &self.site.settings;
        let Some([left_cast, right_cast]) = settings.recipe.casts(product) else { return Ok(None) };
        let [left_is, right_is] = product.operands();
        let a = self.quantized(left_is, left_cast, left, product.summed())?;
        let b = self.quantized(right_is, right_cast, right, product.summed())?;
        // As in TorchTitan, what is summed up again (gradients) is not summed with fewer bits.
        let fast = product == Product::Output;
        multiply(&a, &b, kind, fast, settings.emulate).map(Some)
    }

    /// An operand as a matrix whose last axis is summed over.
    fn quantized(
        &self,
        operand: Operand,
        (format, sharing): (Format, Sharing),
        x: &Tensor,
        summed: Axis,
    ) -> Result<Quantized> {
        let site = &self.site;
        let mut matrix = by_features(x)?;
        if operand.axes()[0] == summed {
            matrix = matrix.f_tr().context("an operand")?;
        }
        if let Some(scale) = self.scale_of_codes(operand) {
            if matrix.kind() != format.kind() {
                // The numbers that codes stand for, rounded to another dtype: they get back the codes that they had.
                return with_scale(&matrix, &scale, format);
            }
            let data = matrix.f_contiguous().context("an operand in codes")?;
            let inverse = scale.f_reciprocal().context("a scale")?;
            return Ok(Quantized { data, scale: Scale::Tensor(inverse) });
        }
        match sharing {
            Sharing::Tensor => with_scale(&matrix, &site.scale_of(operand, &matrix, format)?, format),
            Sharing::Rows => {
                let amax = site.maximum(operand, amax_of_rows(&matrix)?, site.groups_of(&[summed]))?;
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
        match self.multiplied(Product::Output, x, weight, weight.kind())? {
            Some(product) => Ok(with_leading_axes_of(x, &product)?),
            None => Native.output(x, weight),
        }
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> ferrotitan_nn::Result<Tensor> {
        match self.multiplied(Product::InputGradient, dy, weight, weight.kind())? {
            Some(product) => Ok(with_leading_axes_of(dy, &product)?),
            None => Native.input_gradient(dy, weight),
        }
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> ferrotitan_nn::Result<Option<Tensor>> {
        match self.multiplied(Product::WeightGradient, dy, x, weight.kind())? {
            Some(product) => Ok(Some(product)),
            None => Native.weight_gradient(dy, x, weight),
        }
    }

    fn pack(&self, activation: Activation, part: &Tensor) -> ferrotitan_nn::Result<Option<Packed>> {
        let operand = activation.into();
        let Some(format) = self.recipe().whole(operand) else { return Ok(None) };
        let scale = self.site.scale_of_parts(operand, part, format)?;
        Ok(Some(Packed { codes: cast(part, &scale, format)?, scale }))
    }

    fn of_packed(&self, activation: Activation, packed: &Packed) -> Option<Arc<dyn Gemm>> {
        let format = self.recipe().whole(activation.into())?;
        if packed.codes.kind() != format.kind() {
            return None;
        }
        let mut taker = self.clone();
        taker.packed[activation as usize] = Some(Arc::new(Mutex::new(packed.scale.shallow_clone())));
        Some(Arc::new(taker))
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
