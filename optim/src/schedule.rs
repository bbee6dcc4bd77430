//! Learning-rate schedules: warm-up, stable, decay (<https://arxiv.org/abs/2404.06395>), as TorchTitan computes them.

use crate::{Error, Result};

/// The shape of the decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    /// In proportion to the steps.
    Linear,
    /// One minus the root of the part that is over.
    Sqrt,
    /// Half a cosine.
    Cosine,
}

/// The factor on the learning rate at each step: rising over the warm-up, then one, then falling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    warmup: u64,
    stable: u64,
    decay: u64,
    shape: Decay,
    floor: f64,
}

impl LrSchedule {
    /// A schedule of `steps` steps.
    ///
    /// Without a `decay_ratio` the decay begins right after the warm-up; with one it takes that part of the steps, or what
    /// the warm-up leaves of them. `floor` is the factor that the decay leads to.
    ///
    /// # Errors
    /// When `decay_ratio` or `floor` is outside 0 to 1, or the warm-up is longer than the run.
    pub fn new(steps: u64, warmup: u64, decay_ratio: Option<f64>, shape: Decay, floor: f64) -> Result<Self> {
        let within = |name, value| match (0.0..=1.0).contains(&value) {
            true => Ok(()),
            false => Err(Error::Range { name, value, range: "between 0 and 1" }),
        };
        within("the decay ratio", decay_ratio.unwrap_or(0.0))?;
        within("the lowest learning-rate factor", floor)?;
        if warmup > steps {
            return Err(Error::Range {
                name: "the number of warm-up steps",
                value: warmup as f64,
                range: "at most the number of steps",
            });
        }
        let rest = steps - warmup;
        let decay = decay_ratio.map_or(rest, |ratio| ((steps as f64 * ratio).round() as u64).min(rest));
        // One step more than the run has, so that its last step still learns.
        Ok(Self { warmup, stable: steps + 1 - warmup - decay, decay, shape, floor })
    }

    /// The factor at a step, counted from 0.
    #[must_use]
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup {
            return (step + 1) as f64 / self.warmup as f64;
        }
        let over = (step + 1).saturating_sub(self.warmup + self.stable);
        if over == 0 {
            return 1.0;
        }
        let progress = (over as f64 / self.decay.max(1) as f64).min(1.0);
        let left = match self.shape {
            Decay::Linear => 1.0 - progress,
            Decay::Sqrt => 1.0 - progress.sqrt(),
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.floor + (1.0 - self.floor) * left
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn warmup_stable_decay() {
        let schedule = LrSchedule::new(10, 2, Some(0.4), Decay::Linear, 0.0).unwrap();
        let factors: Vec<f64> = (0..10).map(|step| schedule.factor(step)).collect();
        assert_eq!(factors, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]);
    }

    #[test]
    fn decay_begins_after_the_warmup_by_default() {
        let schedule = LrSchedule::new(5, 1, None, Decay::Linear, 0.1).unwrap();
        let factors: Vec<f64> = (0..5).map(|step| schedule.factor(step)).collect();
        let expected = [1.0, 1.0, 0.775, 0.55, 0.325];
        assert!(factors.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{factors:?}");
    }

    #[test]
    fn shapes_meet_their_ends() {
        for shape in [Decay::Linear, Decay::Sqrt, Decay::Cosine] {
            let schedule = LrSchedule::new(100, 0, Some(0.5), shape, 0.2).unwrap();
            assert_eq!(schedule.factor(50), 1.0);
            assert!((schedule.factor(100) - 0.2).abs() < 1e-12, "{shape:?}");
        }
        let half = |shape| LrSchedule::new(100, 0, Some(0.5), shape, 0.0).unwrap().factor(75);
        assert!((half(Decay::Linear) - 0.5).abs() < 1e-12);
        assert!((half(Decay::Cosine) - 0.5).abs() < 1e-12);
        assert!((half(Decay::Sqrt) - (1.0 - 0.5_f64.sqrt())).abs() < 1e-12);
    }

    #[test]
    fn bad_settings() {
        assert!(LrSchedule::new(10, 11, None, Decay::Linear, 0.0).is_err());
        assert!(LrSchedule::new(10, 0, Some(1.5), Decay::Linear, 0.0).is_err());
        assert!(LrSchedule::new(10, 0, Some(f64::NAN), Decay::Linear, 0.0).is_err());
        assert!(LrSchedule::new(10, 0, None, Decay::Linear, -0.1).is_err());
    }

    proptest! {
        #[test]
        fn rises_then_falls_and_never_stops(
            steps in 1_u64..500, warmup in 0_u64..500, ratio in proptest::option::of(0.0..=1.0_f64), floor in 0.0..1.0_f64,
        ) {
            let warmup = warmup % (steps + 1);
            for shape in [Decay::Linear, Decay::Sqrt, Decay::Cosine] {
                let schedule = LrSchedule::new(steps, warmup, ratio, shape, floor).unwrap();
                let factors: Vec<f64> = (0..steps).map(|step| schedule.factor(step)).collect();
                let top = warmup.saturating_sub(1) as usize;
                prop_assert!(factors[..top].windows(2).all(|w| w[0] <= w[1]));
                prop_assert!(factors[top.min(factors.len() - 1)..].windows(2).all(|w| w[0] >= w[1]));
                prop_assert!(factors.iter().all(|&f| f > 0.0 && f <= 1.0));
            }
        }
    }
}
