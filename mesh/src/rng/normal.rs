//! The standard normal distribution function and its inverse.
//!
//! Written with exactly rounded operations only (no `ln` or `exp` of the platform), so that initial weights are the same
//! bits everywhere.

use std::f64::consts::FRAC_1_SQRT_2;

/// The standard normal quantile: the inverse of [`cdf`], for a probability strictly between 0 and 1.
///
/// Algorithm AS 241, PPND16 (Wichura, Applied Statistics 37(3), 1988): relative error about 1e-16 before rounding; the
/// tests hold it to 2e-15. Infinite at 0 and 1, NaN outside.
#[inline]
pub fn quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180625 - q * q;
        return q * ratio(r, &CENTRE);
    }
    tail(p, q)
}

/// The outer 15 % of the quantile.
fn tail(p: f64, q: f64) -> f64 {
    let smaller = if q < 0.0 { p } else { 1.0 - p };
    if smaller <= 0.0 || smaller.is_nan() {
        return if smaller == 0.0 { f64::INFINITY.copysign(q) } else { f64::NAN };
    }
    let r = (-ln(smaller)).sqrt();
    let z = if r <= 5.0 { ratio(r - 1.6, &NEAR) } else { ratio(r - 5.0, &FAR) };
    z.copysign(q)
}

/// The standard normal distribution function: the probability of a value below `x`.
///
/// From -2 up, the power series of its odd part (Marsaglia, "Evaluating the Normal Distribution", 2004), relative error
/// below 1e-14; below -2, Laplace's continued fraction, relative error below 1e-13 down to -37, where it nears the least
/// `f64`. Not fast: it is needed twice per tensor.
pub fn cdf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x < -2.0 {
        // phi(x) / (t + 1 / (t + 2 / (t + 3 / ...))) with t = -x, from the inside outwards.
        let fraction = (1..=100).rev().fold(-x, |inner, n| f64::from(n) / inner - x);
        return if fraction.is_finite() { density(x) / fraction } else { 0.0 };
    }
    if x > 2.0 {
        return 1.0 - cdf(-x);
    }
    // 1/2 + phi(x) * (x + x^3 / 3 + x^5 / (3 * 5) + ...)
    let (mut sum, mut term, mut n) = (0.0, x, 1.0);
    while sum + term != sum {
        sum += term;
        n += 2.0;
        term *= x * x / n;
    }
    0.5 + density(x) * sum
}

/// The standard normal density.
fn density(x: f64) -> f64 {
    // 1 / sqrt(2 pi)
    const SCALE: f64 = 0.398_942_280_401_432_7;
    SCALE * exp(-0.5 * x * x)
}

/// ln 2, in two parts: multiples of the first up to 2^11 are exact.
const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// The natural logarithm of a positive finite number: 2 artanh((m - 1) / (m + 1)) + e ln 2 for x = m 2^e. The series ends
/// below half a unit in the last place.
fn ln(x: f64) -> f64 {
    let (x, shift) = if x < f64::MIN_POSITIVE { (x * (1_u64 << 54) as f64, 54) } else { (x, 0) };
    let mut exponent = (x.to_bits() >> 52) as i64 - 1023 - shift;
    let mut mantissa = f64::from_bits(x.to_bits() & (u64::MAX >> 12) | 1023 << 52);
    if mantissa > 2.0 * FRAC_1_SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let f = (mantissa - 1.0) / (mantissa + 1.0);
    let square = f * f;
    // Every other term in a sum of its own, so that the two run side by side.
    let fourth = square * square;
    let odd = horner(fourth, &[1.0 / 3.0, 1.0 / 7.0, 1.0 / 11.0, 1.0 / 15.0, 1.0 / 19.0, 1.0 / 23.0]);
    let even = horner(fourth, &[1.0 / 5.0, 1.0 / 9.0, 1.0 / 13.0, 1.0 / 17.0, 1.0 / 21.0]);
    let series = square * (odd + square * even);
    let exponent = exponent as f64;
    exponent * LN_2_HIGH + (exponent * LN_2_LOW + 2.0 * (f + f * series))
}

/// e to a power that is not positive: the Taylor series after taking out powers of two.
fn exp(x: f64) -> f64 {
    if x < -745.2 {
        return 0.0;
    }
    let k = (x * std::f64::consts::LOG2_E).round();
    let r = (x - k * LN_2_HIGH) - k * LN_2_LOW;
    let series = (1..=14).rev().fold(1.0, |sum, n| 1.0 + sum * r / f64::from(n));
    // Two factors, since a power of two below 2^-1022 is not a normal number.
    let half = k as i64 / 2;
    series * power_of_two(half) * power_of_two(k as i64 - half)
}

/// 2^k for k from -1022 to 1023.
fn power_of_two(k: i64) -> f64 {
    f64::from_bits(((k + 1023) as u64) << 52)
}

/// The ratio of two polynomials.
#[inline]
fn ratio(x: f64, [numerator, denominator]: &[[f64; 8]; 2]) -> f64 {
    horner(x, numerator) / horner(x, denominator)
}

/// A polynomial, coefficients from the constant up.
#[inline]
fn horner<const N: usize>(x: f64, coefficients: &[f64; N]) -> f64 {
    coefficients.iter().rev().fold(0.0, |sum, coefficient| sum * x + coefficient)
}

/// For probabilities within 0.425 of a half, in r = 0.180625 - (p - 1/2)^2.
#[rustfmt::skip]
const CENTRE: [[f64; 8]; 2] = [
    [3.387_132_872_796_366_6, 1.331_416_678_917_843_7e2, 1.971_590_950_306_551_4e3, 1.373_169_376_550_946e4,
     4.592_195_393_154_987e4, 6.726_577_092_700_87e4, 3.343_057_558_358_813e4, 2.509_080_928_730_122_7e3],
    [1.0, 4.231_333_070_160_091e1, 6.871_870_074_920_579e2, 5.394_196_021_424_751e3,
     2.121_379_430_158_659_7e4, 3.930_789_580_009_271e4, 2.872_908_573_572_194_3e4, 5.226_495_278_852_854e3],
];

/// For r = sqrt(-ln p) up to 5, in r - 1.6.
#[rustfmt::skip]
const NEAR: [[f64; 8]; 2] = [
    [1.423_437_110_749_683_5, 4.630_337_846_156_546, 5.769_497_221_460_691, 3.647_848_324_763_204_5,
     1.270_458_252_452_368_4, 2.417_807_251_774_506e-1, 2.272_384_498_926_918_4e-2, 7.745_450_142_783_414e-4],
    [1.0, 2.053_191_626_637_759, 1.676_384_830_183_803_8, 6.897_673_349_851e-1,
     1.481_039_764_274_800_8e-1, 1.519_866_656_361_645_7e-2, 5.475_938_084_995_345e-4, 1.050_750_071_644_416_9e-9],
];

/// For r = sqrt(-ln p) from 5, in r - 5.
#[rustfmt::skip]
const FAR: [[f64; 8]; 2] = [
    [6.657_904_643_501_103, 5.463_784_911_164_114, 1.784_826_539_917_291_3, 2.965_605_718_285_048_7e-1,
     2.653_218_952_657_612_4e-2, 1.242_660_947_388_078_4e-3, 2.711_555_568_743_487_6e-5, 2.010_334_399_292_288_1e-7],
    [1.0, 5.998_322_065_558_88e-1, 1.369_298_809_227_358e-1, 1.487_536_129_085_061_5e-2,
     7.868_691_311_456_133e-4, 1.846_318_317_510_054_8e-5, 1.421_511_758_316_446e-7, 2.044_263_103_389_939_8e-15],
];

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, exact: f64, relative: f64) {
        assert!((found - exact).abs() <= relative * exact.abs(), "{found:e}, not {exact:e}");
    }

    /// Exact values from arbitrary-precision arithmetic (mpmath's `ncdf`).
    #[test]
    fn distribution_function() {
        let exact = [
            (-37.0, 5.725_571_222_524_577e-300),
            (-20.0, 2.753_624_118_606_233_7e-89),
            (-10.0, 7.619_853_024_160_526e-24),
            (-5.0, 2.866_515_718_791_939e-7),
            (-3.0, 0.001_349_898_031_630_094_5),
            (-2.5, 0.006_209_665_325_776_135),
            (-2.0, 0.022_750_131_948_179_21),
            (-1.0, 0.158_655_253_931_457_05),
            (-0.5, 0.308_537_538_725_986_9),
            (0.0, 0.5),
            (0.25, 0.598_706_325_682_923_7),
            (1.0, 0.841_344_746_068_542_9),
            (3.0, 0.998_650_101_968_369_9),
        ];
        for (x, p) in exact {
            close(cdf(x), p, if x < -2.5 { 1e-13 } else { 1e-14 });
        }
        assert_eq!((cdf(-100.0), cdf(100.0)), (0.0, 1.0));
        assert_eq!((cdf(f64::NEG_INFINITY), cdf(f64::INFINITY)), (0.0, 1.0));
        assert!(cdf(f64::NAN).is_nan());
    }

    /// Exact values by solving `ncdf(x) = p` in arbitrary precision.
    #[test]
    fn quantiles() {
        let exact = [
            (1e-300, -37.047_096_299_361_2),
            (1e-100, -21.273_453_560_965_324),
            (1e-20, -9.262_340_089_798_408),
            (1e-10, -6.361_340_902_404_056),
            (1e-5, -4.264_890_793_922_825),
            (0.01, -2.326_347_874_040_841),
            (0.07, -1.475_791_028_179_170_7),
            (0.1, -1.281_551_565_544_600_4),
            (0.3, -0.524_400_512_708_040_8),
            (0.6, 0.253_347_103_135_799_7),
            (0.99, 2.326_347_874_040_841),
        ];
        for (p, x) in exact {
            close(quantile(p), x, 2e-15);
        }
        assert_eq!((quantile(0.0), quantile(0.5), quantile(1.0)), (f64::NEG_INFINITY, 0.0, f64::INFINITY));
        assert!([-0.1, 1.1, f64::NAN].into_iter().all(|p| quantile(p).is_nan()));
    }

    #[test]
    fn inverse_of_each_other() {
        for step in 0..=3700 {
            let x = f64::from(step) * -0.01;
            close(quantile(cdf(x)), x, 1e-12);
        }
    }

    #[test]
    fn own_functions_match_the_platforms() {
        for step in 1..2000 {
            let x = f64::from(step) * 0.37;
            close(exp(-x), (-x).exp(), 4.0 * f64::EPSILON + f64::from_bits(1) / (-x).exp());
            close(ln((-x).exp()), (-x).exp().ln(), 2.0 * f64::EPSILON);
            close(ln(x), x.ln(), 2.0 * f64::EPSILON);
        }
        assert_eq!((exp(0.0), exp(-746.0), ln(1.0)), (1.0, 0.0, 0.0));
    }
}
