//! Products: against fp64, and libtorch's against the emulation.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use ferrotitan_float8::nn::mesh::rng::Distribution;
use ferrotitan_float8::nn::{Gemm, Model, NamedLayer, Plain, Projection, Seam};
use ferrotitan_float8::tch::{Device, Kind, Tensor, manual_seed};
use ferrotitan_float8::{
    Float8, Format, Options, Quantized, Recipe, multiply, quantize, quantize_blocks, quantize_rows,
};
use proptest::prelude::*;

/// The products of one projection by a recipe, without a model around it.
fn gemm(options: Options, inputs: usize, outputs: usize) -> Arc<dyn Gemm> {
    let projection = Projection::new("only", inputs, outputs, Distribution::Normal { mean: 0.0, std: 1.0 });
    let head = ferrotitan_float8::nn::Head::new("only", Box::new(Plain::new(vec![projection])));
    let mut model = Model::new(vec![NamedLayer::new("only", head)]);
    Float8::new(Options { filter_fqns: Vec::new(), ..options }).attach(&mut model).unwrap();
    let mut seams = model.seams();
    let Seam::Linear(linear) = &mut seams[0].1 else { panic!("the head has its projection first") };
    Arc::clone(&linear.projections()[0].gemm)
}

/// Signal to noise in decibels.
fn quality(exact: &Tensor, found: &Tensor) -> f64 {
    let (exact, found) = (exact.to_kind(Kind::Double), found.to_kind(Kind::Double));
    let norm = |t: &Tensor| t.square().sum(Kind::Double).sqrt().double_value(&[]);
    20.0 * (norm(&exact) / norm(&(&exact - found))).log10()
}

fn random(shape: [i64; 2], heavy: bool) -> Tensor {
    let normal = Tensor::randn(shape, (Kind::Float, Device::Cpu));
    // Some elements are hundreds of times as large as most.
    let x = if heavy { &normal * normal.square() * (normal.abs() * 0.5).exp() } else { normal };
    x.to_kind(Kind::BFloat16)
}

/// The qualities of the three products: output, input gradient, weight gradient.
fn qualities(recipe: Recipe, heavy: bool) -> [f64; 3] {
    manual_seed(17);
    let (tokens, inputs, outputs) = (96, 128, 64);
    let gemm = gemm(Options::of(recipe), inputs as usize, outputs as usize);
    let (x, w, dy) =
        (random([tokens, inputs], heavy), random([outputs, inputs], heavy), random([tokens, outputs], heavy));
    let exact = |a: &Tensor, b: &Tensor| a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
    [
        quality(&exact(&x, &w.tr()), &gemm.output(&x, &w).unwrap()),
        quality(&exact(&dy, &w), &gemm.input_gradient(&dy, &w).unwrap()),
        quality(&exact(&dy.tr(), &x), &gemm.weight_gradient(&dy, &x, &w).unwrap().unwrap()),
    ]
}

#[test]
fn signal_to_noise_is_above_these_thresholds() {
    let thresholds = [
        (Recipe::Tensorwise, [27.5, 24.0, 24.0], [27.5, 24.0, 24.0]),
        (Recipe::Rowwise, [27.5, 27.5, 27.5], [26.5, 26.5, 26.5]),
        (Recipe::RowwiseWithGwHp, [27.5, 27.5, 45.0], [26.5, 26.5, 45.0]),
        (Recipe::Mxfp8, [26.5, 26.5, 26.5], [23.0, 23.0, 23.0]),
    ];
    for (recipe, random, heavy) in thresholds {
        for (inputs, least) in [(false, random), (true, heavy)] {
            let found = qualities(recipe, inputs);
            eprintln!("{recipe}, heavy tails {inputs}: {found:.2?} dB");
            assert!(found.iter().zip(least).all(|(found, least)| *found > least), "{recipe} {inputs}: {found:?}");
            // Less than what two roundings of three bits cost would mean that nothing was cast.
            assert!(recipe == Recipe::RowwiseWithGwHp || found.iter().all(|found| *found < 40.0), "{found:?}");
        }
    }
}

/// Whether libtorch's product on this CPU is its own loop rather than that of matrix units.
fn is_plain_cpu() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| !text.contains("amx"))
}

fn quantized(x: &Tensor, how: usize, format: Format, power_of_two: bool) -> Quantized {
    match how {
        0 => quantize(x, format, power_of_two),
        1 => quantize_rows(x, format, power_of_two),
        _ => quantize_blocks(x, format),
    }
    .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// libtorch's product and the emulation: within the rounding of the sums, and equal where there is none.
    #[test]
    fn both_ways_to_multiply_agree(
        m in 1_i64..40, n in 1_i64..40, k in 1_i64..80, how in (0_usize..3, 0_usize..3), formats in (0_usize..2, 0_usize..2),
        bf16: bool, seed: i64,
    ) {
        manual_seed(seed);
        let kind = if bf16 { Kind::BFloat16 } else { Kind::Float };
        let draw = |rows| Tensor::randn([rows, k], (Kind::Float, Device::Cpu));
        let (a, b) = (draw(m), draw(n));
        let (a, b) = (
            quantized(&a, how.0, Format::ALL[formats.0], false),
            quantized(&b, how.1, Format::ALL[formats.1], false),
        );
        let (theirs, ours) = (multiply(&a, &b, kind, true, false).unwrap(), multiply(&a, &b, kind, true, true).unwrap());
        prop_assert_eq!(theirs.kind(), kind);
        prop_assert_eq!(theirs.size(), [m, n]);
        if is_plain_cpu() {
            prop_assert!(theirs.equal(&ours));
        }
        let (exact_a, exact_b) = (a.dequantize(Kind::Double).unwrap(), b.dequantize(Kind::Double).unwrap());
        let exact = exact_a.matmul(&exact_b.tr());
        let terms = exact_a.abs().matmul(&exact_b.abs().tr());
        let rounding = if bf16 { 2_f64.powi(-8) } else { (k + 4) as f64 * 2_f64.powi(-24) };
        for product in [theirs, ours] {
            let off = (product.to_kind(Kind::Double) - &exact).abs();
            prop_assert!(off.le_tensor(&(&terms * rounding + 1e-30)).all().int64_value(&[]) == 1);
        }
        let in_double = multiply(&a, &b, Kind::Double, true, false).unwrap();
        prop_assert!((in_double - &exact).abs().le_tensor(&(&terms * 1e-14)).all().int64_value(&[]) == 1);
    }

    /// Small integers: all sums are exact, so the order of summation cannot matter.
    #[test]
    fn exact_sums_are_equal_to_the_bit(m in 1_i64..20, n in 1_i64..20, k in 1_i64..100, rows: bool, seed: i64) {
        manual_seed(seed);
        let draw = |rows| {
            let x = Tensor::randint_low(-7, 8, [rows, k], (Kind::Float, Device::Cpu));
            // Every row reaches the same power of two, so that scales are powers of two.
            let _ = x.narrow(1, 0, 1).fill_(7.0);
            x
        };
        let (x, y) = (draw(m), draw(n));
        let how = usize::from(rows);
        let (a, b) = (quantized(&x, how, Format::E4m3, true), quantized(&y, how, Format::E4m3, true));
        for emulate in [false, true] {
            let product = multiply(&a, &b, Kind::Float, false, emulate).unwrap();
            prop_assert!(product.equal(&x.matmul(&y.tr())));
        }
    }

    /// Leading axes are tokens, and empty operands are operands.
    #[test]
    fn shapes_are_those_of_native_products(batch in 0_i64..3, seq in 0_i64..5, recipe in 0_usize..4) {
        let recipe = Recipe::ALL[recipe];
        let gemm = gemm(Options::of(recipe), 32, 64);
        let x = Tensor::randn([batch, seq, 32], (Kind::Float, Device::Cpu));
        let w = Tensor::randn([64, 32], (Kind::Float, Device::Cpu));
        let y = gemm.output(&x, &w).unwrap();
        prop_assert_eq!(y.size(), [batch, seq, 64]);
        prop_assert_eq!(gemm.input_gradient(&y, &w).unwrap().size(), [batch, seq, 32]);
        prop_assert_eq!(gemm.weight_gradient(&y, &x, &w).unwrap().unwrap().size(), [64, 32]);
        prop_assert_eq!(y.kind(), Kind::Float);
    }
}

#[test]
fn bad_operands_are_refused() {
    let matrix =
        |rows, columns| quantize(&Tensor::ones([rows, columns], (Kind::Float, Device::Cpu)), Format::E4m3, false);
    let message = multiply(&matrix(3, 4).unwrap(), &matrix(3, 5).unwrap(), Kind::Float, false, true).unwrap_err();
    assert!(message.to_string().contains("[3, 4]") && message.to_string().contains("[3, 5]"), "{message}");
    assert!(quantize_rows(&Tensor::ones([4], (Kind::Float, Device::Cpu)), Format::E4m3, false).is_err());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for recipe in Recipe::ALL {
            let gemm = gemm(Options::of(recipe), 32, 32);
            let good = Tensor::ones([32, 32], (Kind::Float, Device::Cpu));
            let broken = good.copy();
            let _ = broken.get(7).get(3).fill_(f64::from(bad));
            let message = gemm.output(&broken, &good).unwrap_err().to_string();
            assert!(message.contains("only.weight: the input"), "{message}");
            let message = gemm.output(&good, &broken).unwrap_err().to_string();
            assert!(message.contains("only.weight: the weight"), "{message}");
            let message = gemm.input_gradient(&broken, &good).unwrap_err().to_string();
            assert!(message.contains("only.weight: the gradient"), "{message}");
        }
    }
}

#[test]
fn no_recipe_by_another_name() {
    for recipe in Recipe::ALL {
        assert_eq!(recipe.name().parse::<Recipe>().unwrap(), recipe);
    }
    let message = "tensor".parse::<Recipe>().unwrap_err().to_string();
    assert!(message.contains("\"tensor\"") && message.contains("rowwise_with_gw_hp"), "{message}");
}
