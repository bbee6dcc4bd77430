//! The eight-bit formats, code by code.
//!
//! E4M3 and E5M2 after Micikevicius et al. 2022 (<https://arxiv.org/abs/2209.05433>), E8M0 after the OCP Microscaling
//! formats 1.0 (<https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>).

use tch::Kind;

/// An eight-bit floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// One sign bit, four of exponent, three of mantissa; no infinity, one NaN a sign. For inputs and weights.
    E4m3,
    /// One sign bit, five of exponent, two of mantissa; with infinities. For gradients, which span more.
    E5m2,
}

impl Format {
    /// Both formats.
    pub const ALL: [Format; 2] = [Format::E4m3, Format::E5m2];

    /// The largest finite magnitude: 448 and 57344.
    #[must_use]
    pub const fn max(self) -> f64 {
        match self {
            Format::E4m3 => 448.0,
            Format::E5m2 => 57344.0,
        }
    }

    /// libtorch's dtype.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Format::E4m3 => Kind::Float8e4m3fn,
            Format::E5m2 => Kind::Float8e5m2,
        }
    }

    /// Bits of the mantissa.
    const fn mantissa(self) -> u32 {
        match self {
            Format::E4m3 => 3,
            Format::E5m2 => 2,
        }
    }

    /// What is added to the exponent to make it positive.
    const fn bias(self) -> i32 {
        match self {
            Format::E4m3 => 7,
            Format::E5m2 => 15,
        }
    }

    /// The exponent of the largest finite magnitude.
    #[must_use]
    pub const fn max_exponent(self) -> i32 {
        match self {
            Format::E4m3 => 8,
            Format::E5m2 => 15,
        }
    }

    /// What a code stands for, exactly.
    #[must_use]
    pub fn decode(self, code: u8) -> f32 {
        let (bits, bias) = (self.mantissa(), self.bias());
        let (exponent, mantissa) = (i32::from(code & 0x7f) >> bits, u32::from(code) & ((1 << bits) - 1));
        let magnitude = match (self, exponent, mantissa) {
            (Format::E4m3, 15, 7) => f32::NAN,
            (Format::E5m2, 31, 0) => f32::INFINITY,
            (Format::E5m2, 31, _) => f32::NAN,
            (_, 0, _) => mantissa as f32 * two_to(1 - bias - bits as i32),
            _ => (mantissa + (1 << bits)) as f32 * two_to(exponent - bias - bits as i32),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    /// The code of the nearest value, of two equally near ones that with an even code. A finite value beyond the largest
    /// becomes the largest; an infinity becomes E5M2's infinity or E4M3's NaN.
    #[must_use]
    pub fn encode(self, value: f32) -> u8 {
        let (bits, bias) = (self.mantissa(), self.bias());
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let (nan, infinity) = match self {
            Format::E4m3 => (0x7f, 0x7f),
            Format::E5m2 => (0x7f, 0x7c),
        };
        if value.is_nan() {
            return sign | nan;
        }
        if value.is_infinite() {
            return sign | infinity;
        }
        let magnitude = value.abs().min(self.max() as f32);
        // Below the smallest normal value the spacing stays what it is there.
        let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(1 - bias);
        // Powers of two divide without a rounding error, so this is the only one. A carry moves on to the exponent.
        let steps = (magnitude / two_to(exponent - bits as i32)).round_ties_even() as u32;
        let code = (((exponent + bias) as u32) << bits) + steps - (1 << bits);
        sign | code as u8
    }
}

/// What a code of E8M0, the format of a block's scale, stands for: a power of two, or NaN.
#[must_use]
pub fn e8m0_decode(code: u8) -> f32 {
    match code {
        255 => f32::NAN,
        // 2^-127 is not normal in fp32.
        0 => f32::from_bits(1 << 22),
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// The code of the largest power of two that is no larger than `value`, of the smallest power where `value` is smaller
/// than that, of NaN where it is no positive finite number.
#[must_use]
pub fn e8m0_encode(value: f32) -> u8 {
    if value.is_finite() && !value.is_sign_negative() { (value.to_bits() >> 23) as u8 } else { 255 }
}

/// A power of two that is normal in fp32.
fn two_to(exponent: i32) -> f32 {
    debug_assert!((-126..=127).contains(&exponent));
    f32::from_bits(((exponent + 127) as u32) << 23)
}
