//! How long actions take.

use crate::action::{Action, Kind, Step};
use crate::error::Unsound;

/// Sums of many costs this large are still finite.
const MAX_COST: f64 = 1e100;

/// How long actions take, in any unit of time.
///
/// ```
/// use ferrotitan_schedule::Costs;
/// // Times in units of one forward of all of a rank's layers, where each rank holds two stages.
/// let costs = Costs { communication: 0.1, ..Costs::per_rank(2) };
/// assert_eq!(costs.forward, 0.5);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// A forward of one stage.
    pub forward: f64,
    /// An input gradient of one stage.
    pub input_gradient: f64,
    /// A weight gradient of one stage. A full backward takes both.
    pub weight_gradient: f64,
    /// What passes between the end of an action and the start of one that needs its output on another rank. Nobody is
    /// busy with it: transfers run beside computation.
    pub communication: f64,
    /// How much of the shorter action of an overlapped pair is hidden behind the longer: 0 when the pair takes as long
    /// as both, 1 when it takes as long as the longer.
    pub overlap: f64,
    /// A factor of the three durations for each stage, where stages differ. Stages beyond its end have factor 1.
    pub stage_factors: Vec<f64>,
}

impl Default for Costs {
    /// A forward, an input gradient and a weight gradient of one stage take 1 each, communication nothing.
    fn default() -> Self {
        Self {
            forward: 1.0,
            input_gradient: 1.0,
            weight_gradient: 1.0,
            communication: 0.0,
            overlap: 0.0,
            stage_factors: Vec::new(),
        }
    }
}

impl Costs {
    /// Costs in units of one forward of all of a rank's layers: a stage takes 1/`stages_per_rank`.
    pub fn per_rank(stages_per_rank: usize) -> Self {
        let stage = 1.0 / stages_per_rank.max(1) as f64;
        Self { forward: stage, input_gradient: stage, weight_gradient: stage, ..Self::default() }
    }

    /// How long an action takes.
    pub fn action(&self, action: Action) -> f64 {
        let factor = self.stage_factors.get(action.stage).copied().unwrap_or(1.0);
        factor
            * match action.kind {
                Kind::Forward => self.forward,
                Kind::InputGradient => self.input_gradient,
                Kind::WeightGradient => self.weight_gradient,
                Kind::Backward => self.input_gradient + self.weight_gradient,
            }
    }

    /// How long a step takes.
    pub fn step(&self, step: Step) -> f64 {
        match step {
            Step::One(action) => self.action(action),
            Step::Pair { forward, backward } => {
                let (forward, backward) = (self.action(forward), self.action(backward));
                forward + backward - self.overlap * forward.min(backward)
            }
        }
    }

    /// Refuses what is not a duration, and durations whose sum would not be a number.
    pub(crate) fn check(&self) -> Result<(), Unsound> {
        let named = [
            ("a forward", self.forward),
            ("an input gradient", self.input_gradient),
            ("a weight gradient", self.weight_gradient),
            ("communication", self.communication),
        ];
        let factors = self.stage_factors.iter().map(|&factor| ("a stage's factor", factor));
        match named.into_iter().chain(factors).find(|(_, value)| !(0.0..=MAX_COST).contains(value)) {
            Some((what, value)) => Err(Unsound::Cost { what, value }),
            None if !(0.0..=1.0).contains(&self.overlap) => Err(Unsound::Overlap { overlap: self.overlap }),
            None => Ok(()),
        }
    }
}
