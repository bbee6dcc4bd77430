//! Largest magnitudes, and the scales that bring them to the end of a format.

use tch::{Kind, Tensor};

use crate::error::Context as _;
use crate::format::e8m0_decode;
use crate::{Format, Result};

/// The least magnitude that a scale is computed for, so that a tensor of zeros has one.
pub const EPS: f64 = 1e-12;

/// How many neighbouring elements share a scale in the MX formats.
pub const BLOCK: i64 = 32;

/// The largest magnitude of all elements: fp32, a scalar. NaN where an element is; 0 where there is none.
///
/// # Errors
/// When libtorch fails.
pub fn amax(x: &Tensor) -> Result<Tensor> {
    if x.numel() == 0 {
        return Ok(Tensor::zeros([], (Kind::Float, x.device())));
    }
    // Without a copy of the magnitudes. Rounding to fp32 keeps the order, so it may come last.
    let magnitude =
        x.f_aminmax(None, false).and_then(|(low, high)| low.f_neg()?.f_maximum(&high)?.f_abs()?.f_to_kind(Kind::Float));
    magnitude.context("the largest magnitude")
}

/// The largest magnitude of each row of a matrix `[m, k]`: fp32 `[m, 1]`.
///
/// # Errors
/// When `x` is no matrix, or libtorch fails.
pub fn amax_of_rows(x: &Tensor) -> Result<Tensor> {
    let (m, k) = x.size2().context("the largest magnitude of rows")?;
    if m * k == 0 {
        return Ok(Tensor::zeros([m, 1], (Kind::Float, x.device())));
    }
    // Along an axis, libtorch's `aminmax` is ten times as slow as this.
    let magnitude = x.f_abs().and_then(|x| x.f_amax([1_i64].as_slice(), true)?.f_to_kind(Kind::Float));
    magnitude.context("the largest magnitude of rows")
}

/// What to multiply by so that `amax` becomes the largest value of a format: `max / amax` in fp64, rounded to fp32, and,
/// where asked, down to a power of two. Any shape; fp32.
///
/// NaN where `amax` is not finite, so that whatever is scaled by it is lost visibly.
///
/// # Errors
/// When libtorch fails.
pub fn scale_for(amax: &Tensor, format: Format, power_of_two: bool) -> Result<Tensor> {
    let scale = || {
        let amax64 = amax.f_to_kind(Kind::Double)?.f_clamp_min(EPS)?;
        let largest = Tensor::f_full([], format.max(), (Kind::Double, amax.device()))?;
        let mut scale = largest.f_div(&amax64)?.f_to_kind(Kind::Float)?;
        if power_of_two {
            // Without its mantissa, a normal number is the power of two below it.
            scale = scale.f_view_dtype(Kind::Int)?.f_bitwise_and(0x7f80_0000_i64)?.f_view_dtype(Kind::Float)?;
        }
        // Adds zero to what came of a finite magnitude, and NaN to what did not.
        scale.f_add(&amax.f_mul_scalar(0.0)?)
    };
    scale().context("a scale")
}

/// The E8M0 code of each block's scale, by which its elements are multiplied when they are read: uint8
/// `[m, ceil(k / 32)]`, of a matrix `[m, k]` whose rows are cut into blocks of 32.
///
/// The scale is `2^(floor(log2(amax)) - e)`, with `e` the exponent of the format's largest value, as the OCP
/// specification has it. NaN where an element is not finite.
pub(crate) fn block_codes(x: &Tensor, format: Format) -> Result<Tensor> {
    let (m, k) = x.size2().context("blocks")?;
    let codes = || {
        let blocks = k.unsigned_abs().div_ceil(BLOCK.unsigned_abs()) as i64;
        if m * blocks == 0 {
            return Tensor::f_zeros([m, blocks], (Kind::Uint8, x.device()));
        }
        let padded = x.f_to_kind(Kind::Float)?.f_constant_pad_nd([0, blocks * BLOCK - k])?;
        let amax = padded.f_reshape([m, blocks, BLOCK])?.f_abs()?.f_amax([-1_i64].as_slice(), false)?;
        let exponent = amax.f_view_dtype(Kind::Int)?.f_bitwise_right_shift_tensor_scalar(23)?;
        let code = exponent.f_sub_scalar(i64::from(format.max_exponent()))?.f_clamp(0_i64, 254_i64)?;
        // 255 is the exponent of infinities and NaN.
        code.f_masked_fill(&exponent.f_bitwise_and(0xff_i64)?.f_eq(255_i64)?, 255_i64)?.f_to_kind(Kind::Uint8)
    };
    codes().context("the scales of blocks")
}

/// The numbers that E8M0 codes `[m, blocks]` stand for (or one over each), an element each: fp32 `[m, k]`.
pub(crate) fn spread_blocks(codes: &Tensor, k: i64, inverted: bool) -> Result<Tensor> {
    let value = |code| if inverted { 1.0 / e8m0_decode(code) } else { e8m0_decode(code) };
    let table: Vec<f32> = (0..=255).map(value).collect();
    let spread = || {
        let table = Tensor::f_from_slice(&table)?.f_to_device(codes.device())?;
        let flat = codes.f_to_kind(Kind::Int64)?.f_reshape([-1])?;
        let values = table.f_index_select(0, &flat)?.f_reshape(codes.size())?;
        values.f_repeat_interleave_self_int(BLOCK, 1, None)?.f_narrow(1, 0, k)
    };
    spread().context("the scales of blocks")
}
