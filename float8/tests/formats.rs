//! Every code, every rounding, every scale.
#![allow(clippy::unwrap_used)]

use ferrotitan_float8::tch::{Device, Kind, Tensor};
use ferrotitan_float8::{
    BLOCK, Format, Scale, amax, amax_of_rows, cast, e8m0_decode, e8m0_encode, quantize, quantize_blocks, quantize_rows,
    scale_for,
};
use proptest::prelude::*;

/// The value of a code by the format's definition: sign, exponent and mantissa read off its digits.
fn defined(format: Format, code: u8) -> f64 {
    let digits = format!("{code:08b}");
    let (exponent_digits, bias) = match format {
        Format::E4m3 => (4, 7),
        Format::E5m2 => (5, 15),
    };
    let sign = if digits.starts_with('1') { -1.0 } else { 1.0 };
    let (exponent, mantissa) = digits[1..].split_at(exponent_digits);
    let fraction: f64 =
        mantissa.chars().zip(1..).map(|(c, place)| if c == '1' { 0.5_f64.powi(place) } else { 0.0 }).sum();
    let power = i32::from_str_radix(exponent, 2).unwrap();
    match (format, exponent.contains('0'), mantissa.contains('0')) {
        (Format::E4m3, false, false) => f64::NAN,
        (Format::E5m2, false, _) => {
            if fraction == 0.0 {
                sign * f64::INFINITY
            } else {
                f64::NAN
            }
        }
        _ if power == 0 => sign * fraction * 2_f64.powi(1 - bias),
        _ => sign * (1.0 + fraction) * 2_f64.powi(power - bias),
    }
}

/// The code of the nearest value, found by looking at all of them; of two equally near ones the even code.
fn nearest(format: Format, value: f64) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs().min(format.max());
    let distance = |code: u8| (defined(format, code) - magnitude).abs();
    let codes = (0..0x80_u8).filter(|&code| defined(format, code).is_finite());
    sign | codes.min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

fn same(a: f64, b: f64) -> bool {
    a == b && a.is_sign_negative() == b.is_sign_negative() || a.is_nan() && b.is_nan()
}

fn codes_of(tensor: &Tensor) -> Vec<u8> {
    Vec::try_from(&tensor.view_dtype(Kind::Uint8).reshape([-1])).unwrap()
}

fn bits_of(tensor: &Tensor) -> Vec<i32> {
    Vec::try_from(&tensor.view_dtype(Kind::Int).reshape([-1])).unwrap()
}

fn one() -> Tensor {
    Tensor::from(1.0_f32)
}

#[test]
fn every_code_decodes_to_its_value() {
    let all: Vec<u8> = (0..=255).collect();
    for format in Format::ALL {
        let theirs = Tensor::from_slice(&all).view_dtype(format.kind()).to_kind(Kind::Float);
        let theirs = Vec::<f32>::try_from(&theirs).unwrap();
        for code in 0..=255 {
            let (ours, value) = (f64::from(format.decode(code)), defined(format, code));
            assert!(same(ours, value), "{format:?} {code:#x}: {ours}, defined {value}");
            assert!(same(f64::from(theirs[code as usize]), value), "{format:?} {code:#x} in libtorch");
        }
        let largest = (0..=255).map(|code| defined(format, code)).filter(|value| value.is_finite()).fold(0.0, f64::max);
        assert_eq!(format.max(), largest);
        assert_eq!(format.max_exponent(), largest.log2().floor() as i32);
    }
    for code in 0..255 {
        assert_eq!(f64::from(e8m0_decode(code)), 2_f64.powi(i32::from(code) - 127));
        assert_eq!(e8m0_encode(e8m0_decode(code)), if code == 0 { 0 } else { code });
    }
    assert!(e8m0_decode(255).is_nan());
}

/// Every value, the middle between any two neighbours, and what lies next to those in fp32.
fn telling_values(format: Format) -> Vec<f32> {
    let mut finite: Vec<f64> = (0..0x80).map(|code| defined(format, code)).filter(|value| value.is_finite()).collect();
    finite.sort_by(f64::total_cmp);
    let middles = finite.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let beyond = [format.max() * 1.03, format.max() * 1.07, format.max() * 4.0, 1e30, 1e-30, 1e-44];
    let telling = middles.chain(finite.iter().copied()).chain(beyond).map(|value| value as f32);
    let around = |value: f32| [value, value.next_up(), value.next_down()];
    telling.flat_map(around).flat_map(|value| [value, -value]).filter(|value| value.is_finite()).collect()
}

#[test]
fn rounds_to_the_nearest_and_saturates() {
    for format in Format::ALL {
        let values = telling_values(format);
        let cast = codes_of(&cast(&Tensor::from_slice(&values), &one(), format).unwrap());
        for (&value, cast) in values.iter().zip(cast) {
            let expected = nearest(format, f64::from(value));
            assert_eq!(format.encode(value), expected, "{format:?} {value:e}");
            assert_eq!(cast, expected, "{format:?} {value:e}, cast");
        }
        assert_eq!(codes_of(&cast_of(&[0.0, -0.0], format)), [0x00, 0x80]);
    }
}

fn cast_of(values: &[f32], format: Format) -> Tensor {
    cast(&Tensor::from_slice(values), &one(), format).unwrap()
}

#[test]
fn every_bf16_is_cast_as_defined() {
    let all: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16)).collect();
    for kind in [Kind::Float, Kind::BFloat16] {
        let tensor = Tensor::from_slice(&all).to_kind(kind);
        for format in Format::ALL {
            let cast = codes_of(&cast(&tensor, &one(), format).unwrap());
            for (&value, code) in all.iter().zip(cast) {
                match value.is_nan() {
                    true => assert!(format.decode(code).is_nan(), "{format:?} {value}"),
                    // An infinity is caught by the scale, not by the cast.
                    false if value.is_infinite() => assert_eq!(f64::from(format.decode(code).abs()), format.max()),
                    false => assert_eq!(code, format.encode(value), "{format:?} {value:e}"),
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_never_saturated() {
    assert!(Format::E4m3.decode(Format::E4m3.encode(f32::INFINITY)).is_nan());
    assert_eq!(Format::E5m2.decode(Format::E5m2.encode(f32::NEG_INFINITY)), f32::NEG_INFINITY);
    for (bad, format, power_of_two) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
        .into_iter()
        .flat_map(|bad| Format::ALL.map(|format| (bad, format)))
        .flat_map(|(bad, format)| [(bad, format, false), (bad, format, true)])
    {
        let mut values = vec![1.0_f32; 64];
        values[5] = bad;
        let x = Tensor::from_slice(&values).view([2, 32]);
        let whole = quantize(&x, format, power_of_two).unwrap().dequantize(Kind::Float).unwrap();
        assert_eq!(whole.isnan().sum(Kind::Int64).int64_value(&[]), 64, "{bad} {format:?}");
        for by_part in [quantize_rows(&x, format, power_of_two), quantize_blocks(&x, format)] {
            let part = by_part.unwrap().dequantize(Kind::Float).unwrap();
            assert_eq!(part.isnan().sum(Kind::Int64).int64_value(&[]), 32, "{bad} {format:?}");
            assert_eq!(part.get(1).ne(1.0).sum(Kind::Int64).int64_value(&[]), 0);
        }
    }
}

#[test]
fn scales_have_these_bits() {
    let scale =
        |amax: f32, format, power_of_two| bits_of(&scale_for(&Tensor::from(amax), format, power_of_two).unwrap())[0];
    let defined = |amax: f32, format: Format| (format.max() / f64::from(amax).max(1e-12)) as f32;
    for format in Format::ALL {
        for amax in [0.0, 1e-45, 1e-13, 1e-12, 3.3e-7, 0.1, 1.0, 3.0, 447.0, 448.0, 57345.0, 1e20, f32::MAX] {
            let expected = defined(amax, format);
            assert_eq!(scale(amax, format, false), expected.to_bits() as i32, "{amax}");
            let power = f32::from_bits(scale(amax, format, true) as u32);
            assert!(power <= expected && expected < 2.0 * power, "{amax}: {power} for {expected}");
            assert_eq!(power.to_bits() & 0x007f_ffff, 0, "{power} is a power of two");
        }
    }
    // 448 / 7 is a power of two itself; the next smaller magnitude has the same, the next larger the half.
    assert_eq!(scale(7.0, Format::E4m3, true), 64_f32.to_bits() as i32);
    assert_eq!(scale(7_f32.next_down(), Format::E4m3, true), 64_f32.to_bits() as i32);
    assert_eq!(scale(7_f32.next_up(), Format::E4m3, true), 32_f32.to_bits() as i32);
}

#[test]
fn nothing_has_a_scale_as_well() {
    for shape in [[0, 5], [3, 0], [0, 0], [2, 64]] {
        let x = Tensor::zeros(shape, (Kind::BFloat16, Device::Cpu));
        assert_eq!(amax(&x).unwrap().double_value(&[]), 0.0);
        assert_eq!(amax_of_rows(&x).unwrap().size(), [shape[0], 1]);
        for quantized in [
            quantize(&x, Format::E4m3, false),
            quantize_rows(&x, Format::E5m2, true),
            quantize_blocks(&x, Format::E4m3),
        ] {
            let back = quantized.unwrap().dequantize(Kind::Float).unwrap();
            assert_eq!(back.size(), shape);
            assert_eq!(back.count_nonzero(None).int64_value(&[]), 0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Blocks by the specification, computed element by element.
    #[test]
    fn blocks_are_those_of_the_specification(
        rows in 1_usize..4, columns in 1_usize..70, spread in 0_i32..40, e5m2: bool, seed: u64,
    ) {
        let format = if e5m2 { Format::E5m2 } else { Format::E4m3 };
        let mut state = seed | 1;
        let mut draw = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let exponent = if spread == 0 { 0 } else { (state >> 40) as i32 % spread - spread / 2 };
            ((state >> 11) as f64 / 2_f64.powi(52) - 1.0) as f32 * 2_f32.powi(exponent)
        };
        let values: Vec<f32> = (0..rows * columns).map(|_| draw()).collect();
        let x = Tensor::from_slice(&values).view([rows as i64, columns as i64]);
        let quantized = quantize_blocks(&x, format).unwrap();
        let Scale::Blocks(scales) = &quantized.scale else { panic!("no blocks") };
        let (codes, scales) = (codes_of(&quantized.data), codes_of(scales));
        let back = Vec::<f32>::try_from(&quantized.dequantize(Kind::Float).unwrap().reshape([-1])).unwrap();
        let blocks = columns.div_ceil(BLOCK as usize);
        for row in 0..rows {
            for block in 0..blocks {
                let range = block * 32..columns.min(block * 32 + 32);
                let of = |column: usize| f64::from(values[row * columns + column]);
                let largest = range.clone().map(|column| of(column).abs()).fold(0.0, f64::max);
                let exponent = if largest == 0.0 { -127 } else { largest.log2().floor() as i32 - format.max_exponent() };
                let code = scales[row * blocks + block];
                prop_assert_eq!(i32::from(code) - 127, exponent.clamp(-127, 127));
                for column in range {
                    let scaled = of(column) * 2_f64.powi(-exponent);
                    let index = row * columns + column;
                    let expected = nearest(format, scaled.clamp(-format.max(), format.max()));
                    prop_assert_eq!(codes[index], expected, "{} of {}", scaled, largest);
                    prop_assert_eq!(f64::from(back[index]), defined(format, expected) * 2_f64.powi(exponent));
                }
            }
        }
    }

    /// Magnitudes and casts by rows and by tensor, computed element by element.
    #[test]
    fn casts_are_those_of_the_definition(
        rows in 1_usize..5, columns in 1_usize..40, exponent in -30_i32..30, by_rows: bool, power_of_two: bool, e5m2: bool,
        seed: i64,
    ) {
        let format = if e5m2 { Format::E5m2 } else { Format::E4m3 };
        ferrotitan_float8::tch::manual_seed(seed);
        let shape = [rows as i64, columns as i64];
        let x = (Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 2_f64.powi(exponent)).to_kind(Kind::BFloat16);
        let values = Vec::<f32>::try_from(&x.to_kind(Kind::Float).reshape([-1])).unwrap();
        let quantized = match by_rows {
            true => quantize_rows(&x, format, power_of_two),
            false => quantize(&x, format, power_of_two),
        };
        let codes = codes_of(&quantized.unwrap().data);
        let largest = |values: &[f32]| values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        for (index, (&value, code)) in values.iter().zip(codes).enumerate() {
            let row = index / columns;
            let amax = largest(if by_rows { &values[row * columns..(row + 1) * columns] } else { &values });
            let mut scale = (format.max() / f64::from(amax).max(1e-12)) as f32;
            if power_of_two {
                scale = 2_f64.powi(f64::from(scale).log2().floor() as i32) as f32;
            }
            prop_assert_eq!(code, format.encode(value * scale), "{} by {}", value, scale);
        }
    }
}
