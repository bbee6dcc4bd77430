//! Products of matrices in eight bits.

use tch::{Device, Kind, Tensor};

use crate::cast::{Quantized, Scale};
use crate::error::Context as _;
use crate::{Error, Result};

/// `a bᵀ` for `a` `[m, k]` and `b` `[n, k]`: `[m, n]` in `kind`, summed in fp32 (in fp64 where `kind` is).
///
/// libtorch's scaled product computes it where it can, unless `emulate` says otherwise; the emulation reads both operands
/// as the numbers that they stand for and multiplies those. The two take the same numbers, so they differ by the order and
/// the precision of the sums alone:
/// - on a CPU without matrix units (AMX) they are equal to the bit, since libtorch does the same there;
/// - wherever all partial sums are exact in fp32 and scales are powers of two, they are equal to the bit on any device;
/// - on a GPU otherwise, `fast` sums (which a GPU may do with fewer bits) differ by more than others.
///
/// # Errors
/// When shapes do not fit, or libtorch fails.
pub fn multiply(a: &Quantized, b: &Quantized, kind: Kind, fast: bool, emulate: bool) -> Result<Tensor> {
    let shapes = (a.data.size(), b.data.size());
    let (&[m, k], &[n, other]) = (shapes.0.as_slice(), shapes.1.as_slice()) else {
        return Err(Error::Shape { left: shapes.0, right: shapes.1 });
    };
    if k != other {
        return Err(Error::Shape { left: shapes.0, right: shapes.1 });
    }
    if !emulate
        && admits(a.data.device(), [m, n, k], kind, is_by_rows(a) || is_by_rows(b))
        && let Some((scale_a, scale_b)) = scales(a, b, m, n)?
    {
        let none = None::<&Tensor>;
        let right = b.data.f_tr().context("a scaled product")?;
        let product = a.data.f_internal_scaled_mm(&right, &scale_a, &scale_b, none, none, kind, fast);
        return product.context("a scaled product; set emulate where the device has none");
    }
    let sum_in = if kind == Kind::Double { Kind::Double } else { Kind::Float };
    let (a, b) = (a.dequantize(sum_in)?, b.dequantize(sum_in)?);
    // Laid out as libtorch's own product on a CPU has it, since the order of summation depends on that.
    let b = b.f_tr().and_then(|b| b.f_contiguous());
    b.and_then(|b| a.f_mm(&b)?.f_to_kind(kind)).context("a product of Float8 values")
}

/// Whether libtorch has a scaled product for such operands.
fn admits(device: Device, [m, n, k]: [i64; 3], kind: Kind, by_rows: bool) -> bool {
    match device {
        Device::Cpu => m * n * k > 0 && matches!(kind, Kind::Float | Kind::BFloat16),
        // cuBLASLt takes multiples of 16, and scales by rows for bf16 results alone.
        Device::Cuda(_) => {
            let fits = m * n * k > 0 && n % 16 == 0 && k % 16 == 0;
            fits && (kind == Kind::BFloat16 || (kind == Kind::Float && !by_rows))
        }
        _ => false,
    }
}

fn is_by_rows(x: &Quantized) -> bool {
    matches!(x.scale, Scale::Rows(_))
}

/// Both scales in the one form that a scaled product takes: scalars, or `[m, 1]` and `[1, n]`.
fn scales(a: &Quantized, b: &Quantized, m: i64, n: i64) -> Result<Option<(Tensor, Tensor)>> {
    if let (Scale::Tensor(left), Scale::Tensor(right)) = (&a.scale, &b.scale) {
        return Ok(Some((left.shallow_clone(), right.shallow_clone())));
    }
    // The new axis is added last, since libtorch wants a step of one along it even where it has one element.
    let along = |scale: &Scale, count: i64, axis: i64| {
        let flat = match scale {
            Scale::Rows(scale) => scale.f_reshape([count]),
            Scale::Tensor(scale) => scale.f_reshape([1]).and_then(|scale| scale.f_repeat([count])),
            Scale::Blocks(_) => return Ok(None),
        };
        flat.and_then(|flat| flat.f_unsqueeze(axis)).map(Some).context("the scale of a product")
    };
    Ok(along(&a.scale, m, 1)?.zip(along(&b.scale, n, 0)?))
}
