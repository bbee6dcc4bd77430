//! Tensors in eight bits.

use tch::{Kind, Tensor};

use crate::error::Context as _;
use crate::scale::{amax, amax_of_rows, block_codes, scale_for, spread_blocks};
use crate::{Format, Result};

/// A matrix `[m, k]` in eight bits, and what its elements are multiplied by when they are read.
///
/// `k` is the axis that a product sums over.
#[derive(Debug)]
pub struct Quantized {
    /// `[m, k]`, contiguous, of a Float8 dtype.
    pub data: Tensor,
    /// What to multiply by.
    pub scale: Scale,
}

/// What the elements of a [`Quantized`] are multiplied by when they are read.
#[derive(Debug)]
pub enum Scale {
    /// One number for all: fp32, a scalar.
    Tensor(Tensor),
    /// One a row: fp32 `[m, 1]`.
    Rows(Tensor),
    /// One for 32 neighbours in a row: E8M0 codes, uint8 `[m, ceil(k / 32)]`.
    Blocks(Tensor),
}

impl Quantized {
    /// The numbers that it stands for, in `kind`.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn dequantize(&self, kind: Kind) -> Result<Tensor> {
        let data = self.data.f_to_kind(kind).context("reading Float8")?;
        let scale = match &self.scale {
            Scale::Tensor(scale) | Scale::Rows(scale) => scale.shallow_clone(),
            Scale::Blocks(codes) => spread_blocks(codes, self.data.size()[1], false)?,
        };
        scale.f_to_kind(kind).and_then(|scale| data.f_mul(&scale)).context("reading Float8")
    }
}

/// `x` times `scale` in fp32, clamped to the format's range, rounded to the nearest, ties to even. `scale` is fp32 and of
/// any shape that broadcasts to that of `x`, which the result has.
///
/// NaN stays NaN. An infinity would become the format's largest value: whoever computed the scale from the largest
/// magnitude, as [`scale_for`] does, has NaN for a scale then.
///
/// # Errors
/// When libtorch fails.
pub fn cast(x: &Tensor, scale: &Tensor, format: Format) -> Result<Tensor> {
    let scaled = x.f_to_kind(Kind::Float).and_then(|x| x.f_mul(scale));
    let cast = scaled.and_then(|mut scaled| scaled.f_clamp_(-format.max(), format.max())?.f_to_kind(format.kind()));
    cast.context("a cast to Float8")
}

/// A matrix `[m, k]` with one scale, from its own largest magnitude.
///
/// # Errors
/// When libtorch fails.
pub fn quantize(x: &Tensor, format: Format, power_of_two: bool) -> Result<Quantized> {
    let scale = scale_for(&amax(x)?, format, power_of_two)?;
    with_scale(x, &scale, format)
}

/// A matrix `[m, k]` with a scale a row.
///
/// # Errors
/// When libtorch fails.
pub fn quantize_rows(x: &Tensor, format: Format, power_of_two: bool) -> Result<Quantized> {
    let scale = scale_for(&amax_of_rows(x)?, format, power_of_two)?;
    with_scale(x, &scale, format)
}

/// A matrix `[m, k]` with a scale for every 32 neighbours of a row (MX).
///
/// # Errors
/// When libtorch fails.
pub fn quantize_blocks(x: &Tensor, format: Format) -> Result<Quantized> {
    with_codes(x, block_codes(x, format)?, format)
}

/// With a scalar or `[m, 1]` scale that is known.
pub(crate) fn with_scale(x: &Tensor, scale: &Tensor, format: Format) -> Result<Quantized> {
    let data = cast(x, scale, format)?.f_contiguous().context("a cast to Float8")?;
    let inverse = scale.f_reciprocal().context("a scale")?;
    Ok(Quantized { data, scale: if scale.dim() == 0 { Scale::Tensor(inverse) } else { Scale::Rows(inverse) } })
}

/// With E8M0 codes of blocks that are known.
pub(crate) fn with_codes(x: &Tensor, codes: Tensor, format: Format) -> Result<Quantized> {
    let (_, k) = x.size2().context("blocks")?;
    let data = cast(x, &spread_blocks(&codes, k, true)?, format)?;
    Ok(Quantized { data: data.f_contiguous().context("a cast to Float8")?, scale: Scale::Blocks(codes) })
}
