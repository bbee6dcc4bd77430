//! What values are drawn from.

use super::normal::{cdf, quantile};
use crate::{Error, Result};

/// A distribution of real numbers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Distribution {
    /// Always this value.
    Constant(f64),
    /// Equally likely anywhere from `low` to `high`.
    Uniform {
        /// The least value.
        low: f64,
        /// The bound above.
        high: f64,
    },
    /// The normal distribution.
    Normal {
        /// Its mean.
        mean: f64,
        /// Its standard deviation.
        std: f64,
    },
    /// The normal distribution confined to an interval, by the inverse of its distribution function: the method, and
    /// the meaning of the bounds (absolute, not in standard deviations), of `torch.nn.init.trunc_normal_`.
    TruncatedNormal {
        /// The mean before truncation.
        mean: f64,
        /// The standard deviation before truncation.
        std: f64,
        /// The least value.
        low: f64,
        /// The greatest value.
        high: f64,
    },
}

/// How far from the mean, in standard deviations, an interval may begin: beyond, the probabilities vanish in `f64`.
const REACH: f64 = 37.0;

impl Distribution {
    /// Refuses parameters that are not finite, a negative deviation, an interval that is empty or whose width overflows,
    /// and a truncation to an interval farther than 37 standard deviations from the mean.
    ///
    /// # Errors
    /// [`Error::Distribution`].
    pub fn validate(&self) -> Result<()> {
        let problem = match *self {
            Distribution::Constant(value) if !value.is_finite() => "the value must be finite",
            Distribution::Uniform { low, high } if !(high - low).is_finite() => "the bounds' difference must be finite",
            Distribution::Uniform { low, high } | Distribution::TruncatedNormal { low, high, .. } if low > high => {
                "low must not be above high"
            }
            Distribution::Normal { mean, std } | Distribution::TruncatedNormal { mean, std, .. }
                if !mean.is_finite() || !std.is_finite() || std < 0.0 =>
            {
                "the mean must be finite, the deviation finite and not negative"
            }
            Distribution::TruncatedNormal { low, high, .. } if low.is_nan() || high.is_nan() => {
                "the bounds must be numbers"
            }
            Distribution::TruncatedNormal { mean, std, low, high }
                if low - mean > REACH * std || mean - high > REACH * std =>
            {
                "the interval must come within 37 deviations of the mean"
            }
            _ => return Ok(()),
        };
        Err(Error::Distribution { distribution: format!("{self:?}"), problem: problem.to_owned() })
    }

    /// What can be computed once for many values.
    pub(super) fn sampler(self) -> Sampler {
        if self.validate().is_err() {
            return Sampler::Constant(f64::NAN);
        }
        match self {
            Distribution::Constant(value) => Sampler::Constant(value),
            Distribution::Uniform { low, high } => Sampler::Uniform { low, width: high - low },
            Distribution::Normal { mean, std } => Sampler::Normal { mean, std },
            Distribution::TruncatedNormal { mean, std: 0.0, .. } => Sampler::Constant(mean),
            Distribution::TruncatedNormal { mean, std, low, high } => {
                Sampler::Truncated(Truncated::new(mean, std, low, high))
            }
        }
    }
}

/// A distribution made ready.
#[derive(Debug)]
pub(super) enum Sampler {
    Constant(f64),
    Uniform { low: f64, width: f64 },
    Normal { mean: f64, std: f64 },
    Truncated(Truncated),
}

/// The normal distribution confined to an interval.
#[derive(Debug)]
pub(super) struct Truncated {
    mean: f64,
    std: f64,
    low: f64,
    high: f64,
    /// The probability below the interval, and that of the interval.
    below: f64,
    width: f64,
}

impl Truncated {
    fn new(mean: f64, std: f64, low: f64, high: f64) -> Self {
        let (a, b) = ((low - mean) / std, (high - mean) / std);
        // Small probabilities are exact only in the lower tail, so an interval above the mean is mirrored into it.
        let (std, a, b) = if a > 0.0 { (-std, -b, -a) } else { (std, a, b) };
        let below = cdf(a);
        Truncated { mean, std, low, high, below, width: cdf(b) - below }
    }

    #[inline]
    pub(super) fn value(&self, u: f64) -> f64 {
        // Rounding may reach a probability of 1, where the quantile is infinite.
        let p = (self.below + self.width * u).min(1.0 - f64::EPSILON / 2.0);
        (self.mean + self.std * quantile(p)).max(self.low).min(self.high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ends of what the generator gives, where a probability could round to 0 or 1.
    #[test]
    fn extreme_draws_are_finite() {
        let (least, greatest) = (f64::EPSILON / 2.0, 1.0 - f64::EPSILON / 2.0);
        for step in -370..370 {
            let bound = f64::from(step) * 0.1;
            for (low, high) in [(bound, f64::INFINITY), (f64::NEG_INFINITY, bound)] {
                let truncated = Truncated::new(0.0, 1.0, low, high);
                let ends = [least, greatest].map(|u| truncated.value(u));
                assert!(ends.iter().all(|end| end.is_finite()), "{ends:?} of {low}..{high}");
            }
        }
    }
}
