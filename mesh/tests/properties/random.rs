use ferrotitan_mesh::rng::{Distribution, Stream, cdf};
use ferrotitan_mesh::{Error, Grid, Region};
use proptest::prelude::*;

use crate::arbitrary::{degrees, dice, elements, layout, shape};

const COUNT: usize = 1 << 17;
const UNIFORM: Distribution = Distribution::Uniform { low: -3.0, high: 5.0 };
const NORMAL: Distribution = Distribution::Normal { mean: 2.0, std: 0.5 };

const fn truncated(mean: f64, std: f64, low: f64, high: f64) -> Distribution {
    Distribution::TruncatedNormal { mean, std, low, high }
}

fn draw(stream: Stream, distribution: Distribution, count: usize) -> Vec<f64> {
    let mut values = vec![0.0; count];
    stream.fill(distribution, 0, &mut values);
    values
}

proptest! {
    #[test]
    fn any_layout_holds_the_single_ranks_values(mut dice in dice(), seed: u64) {
        let (shape, degrees) = (shape(&mut dice), degrees(&mut dice));
        let layout = layout(&mut dice, &shape, &degrees);
        let stream = Stream::new(seed, "weight");
        for distribution in [NORMAL, truncated(0.0, 0.02, -0.06, 0.06)] {
            let whole = draw(stream, distribution, shape.iter().product());
            for grid in Grid::all(degrees).unwrap() {
                let region = layout.local_region(&grid);
                let mut local = vec![0.0; region.numel()];
                stream.fill_region(distribution, &shape, &region, &mut local);
                let wanted: Vec<_> = elements(&shape, &region).into_iter().map(|element| whole[element]).collect();
                prop_assert_eq!(local, wanted);
            }
        }
    }

    /// Any cut of a sequence into pieces, which threads could fill, gives the sequence.
    #[test]
    fn pieces_are_the_whole(mut dice in dice(), seed: u64) {
        let stream = Stream::new(seed, "weight");
        let whole = draw(stream, UNIFORM, 200);
        let mut pieces = vec![0.0; 200];
        let (mut start, mut rest) = (0, &mut pieces[..]);
        while !rest.is_empty() {
            let (piece, after) = rest.split_at_mut(dice.roll(rest.len()) + 1);
            stream.fill(UNIFORM, start, piece);
            start += piece.len() as u64;
            rest = after;
        }
        prop_assert_eq!(&pieces, &whole);
        prop_assert_eq!((0..200).map(|index| stream.sample(UNIFORM, index)).collect::<Vec<_>>(), whole);
    }
}

/// The greatest distance between the values' distribution and the exact one, times the root of their number
/// (Kolmogorov and Smirnov): above 1.95 in one case of 1000. The seeds are fixed, so a test passes always or never.
fn distance(mut values: Vec<f64>, exact: impl Fn(f64) -> f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let n = values.len() as f64;
    let gaps = values.iter().enumerate().map(|(below, value)| {
        let (p, below) = (exact(*value), below as f64 / n);
        (p - below).max(below + 1.0 / n - p)
    });
    gaps.fold(0.0, f64::max) * n.sqrt()
}

#[test]
fn values_follow_their_distribution() {
    for seed in 0..3 {
        let draw = |distribution| draw(Stream::new(seed, "layers.3.feed_forward.w1.weight"), distribution, COUNT);
        assert!(distance(draw(UNIFORM), |x| (x + 3.0) / 8.0) < 1.95);
        assert!(distance(draw(NORMAL), |x| cdf((x - 2.0) / 0.5)) < 1.95);
        // Both sides, one side, far out on either side, narrow, and not truncated to speak of.
        let intervals = [
            (0.0, 1.0, -1.0, 2.0),
            (1.0, 2.0, 1.5, f64::INFINITY),
            (0.0, 1.0, 20.0, 30.0),
            (0.0, 1.0, -30.0, -20.0),
            (0.0, 1.0, 0.5, 0.500_01),
            (0.0, 0.02, -2.0, 2.0),
        ];
        for (mean, std, low, high) in intervals {
            let values = draw(truncated(mean, std, low, high));
            assert!(values.iter().all(|value| (low..=high).contains(value)));
            // In the upper tail, the exact distribution is that of the mirrored one.
            let (a, b) = ((low - mean) / std, (high - mean) / std);
            let below = |x: f64| match a > 0.0 {
                true => (cdf(-a) - cdf(-(x - mean) / std)) / (cdf(-a) - cdf(-b)),
                false => (cdf((x - mean) / std) - cdf(a)) / (cdf(b) - cdf(a)),
            };
            let distance = distance(values, below);
            assert!(distance < 1.95, "{distance} for {low}..{high}");
        }
    }
}

/// Moments within 4 standard errors.
#[test]
fn moments_are_those_of_the_normal() {
    let n = COUNT as f64;
    let values = draw(Stream::new(7, "norm"), Distribution::Normal { mean: 0.0, std: 1.0 }, COUNT);
    let moment = |power| values.iter().map(|value| value.powi(power)).sum::<f64>() / n;
    // The k-th moment's variance is the 2k-th moment less the square of the k-th, by n.
    for (power, exact, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
        let error = moment(power) - exact;
        assert!(error.abs() < 4.0 * f64::sqrt(variance / n), "moment {power} is off by {error}");
    }
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let products = a.iter().zip(b).map(|(a, b)| a * b);
    products.sum::<f64>() / a.len().min(b.len()) as f64
}

#[test]
fn neighbours_and_streams_are_independent() {
    let normal = Distribution::Normal { mean: 0.0, std: 1.0 };
    let bound = 4.0 / (COUNT as f64).sqrt();
    let values = draw(Stream::new(0, "a"), normal, COUNT);
    for lag in [1, 2, 3, 64, 4096] {
        assert!(correlation(&values, &values[lag..]).abs() < bound, "lag {lag}");
    }
    for (seed, name) in [(1, "a"), (0, "b"), (1 << 32, "a"), (u64::MAX, "a"), (0, "a "), (0, "")] {
        let others = draw(Stream::new(seed, name), normal, COUNT);
        assert!(values.iter().zip(&others).all(|(a, b)| a != b));
        assert!(correlation(&values, &others).abs() < bound, "seed {seed}, name {name:?}");
    }
    // Pairs of neighbours fall evenly on a grid: chi-squared with 255 degrees of freedom, within 4 deviations. Both
    // kinds of pair are tried: two values of one block, and the last of one with the first of the next.
    let uniform = draw(Stream::new(0, "a"), Distribution::Uniform { low: 0.0, high: 16.0 }, COUNT + 1);
    for first in [0, 1] {
        let mut cells = [0.0; 256];
        for pair in uniform[first..].chunks_exact(2) {
            cells[pair[0] as usize * 16 + pair[1] as usize] += 1.0;
        }
        let expected = cells.iter().sum::<f64>() / 256.0;
        let chi_squared = cells.iter().map(|count| (count - expected).powi(2) / expected).sum::<f64>();
        assert!((chi_squared - 255.0).abs() < 4.0 * f64::sqrt(2.0 * 255.0), "{chi_squared}");
    }
}

#[test]
fn what_is_no_distribution_is_refused_and_gives_nan() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let refused = [
        Distribution::Constant(nan),
        Distribution::Uniform { low: 1.0, high: 0.0 },
        Distribution::Uniform { low: -f64::MAX, high: f64::MAX },
        Distribution::Uniform { low: nan, high: 0.0 },
        Distribution::Normal { mean: 0.0, std: -1.0 },
        Distribution::Normal { mean: inf, std: 1.0 },
        truncated(0.0, nan, -1.0, 1.0),
        truncated(0.0, 1.0, nan, 1.0),
        truncated(0.0, 1.0, 1.0, -1.0),
        truncated(0.0, 1.0, 38.0, 40.0),
        truncated(0.0, 1.0, -inf, -38.0),
        truncated(0.0, 0.0, 1.0, 2.0),
    ];
    let stream = Stream::new(0, "a");
    for distribution in refused {
        assert!(matches!(distribution.validate(), Err(Error::Distribution { .. })), "{distribution:?}");
        assert!(stream.sample(distribution, 3).is_nan());
    }
    let fixed = [Distribution::Constant(2.5), truncated(2.5, 0.0, 2.0, 3.0), truncated(2.0, 1.0, 2.5, 2.5)];
    for distribution in fixed {
        distribution.validate().unwrap();
        assert_eq!(draw(stream, distribution, 5), [2.5; 5]);
    }
}

#[test]
fn a_region_that_does_not_fit_gives_nan() {
    let stream = Stream::new(0, "a");
    let fill = |offset: usize, length: usize| {
        let mut out = vec![0.0; length];
        stream.fill_region(NORMAL, &[4], &Region { offset: vec![offset], shape: vec![3] }, &mut out);
        out
    };
    assert!(fill(1, 3).iter().all(|value| value.is_finite()));
    assert!(fill(2, 3).iter().chain(&fill(1, 2)).all(|value| value.is_nan()));
}
