//! A cell's curves against its reference's.

use super::cell::Tolerance;
use super::measure::Measured;
use serde::Serialize;

/// The largest deviations of a cell from its reference, relative to it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Deviation {
    /// Of the loss, in training and validation.
    pub(crate) loss: f64,
    /// Of the gradient's norm.
    pub(crate) grad_norm: f64,
}

impl Deviation {
    /// Whether it is as small as it has to be. What is not a number is not.
    pub(crate) fn within(self, tolerance: Tolerance) -> bool {
        self.loss <= tolerance.loss && self.grad_norm <= tolerance.grad_norm
    }
}

/// The deviation of each step, over the steps of `ours`.
///
/// # Errors
/// In words, when the reference lacks a step.
pub(super) fn by_step(ours: &Measured, reference: &Measured) -> Result<Vec<(u64, Deviation)>, String> {
    let mut all = Vec::new();
    for (number, step) in &ours.steps {
        let theirs = reference.steps.get(number).ok_or_else(|| format!("the reference has no step {number}"))?;
        let validation = match (step.validation_loss, theirs.validation_loss) {
            (Some(ours), Some(theirs)) => relative(ours, theirs),
            _ => 0.0,
        };
        let loss = larger(relative(step.loss, theirs.loss), validation);
        all.push((*number, Deviation { loss, grad_norm: relative(step.grad_norm, theirs.grad_norm) }));
    }
    Ok(all)
}

/// The largest of them.
pub(super) fn largest(all: &[(u64, Deviation)]) -> Deviation {
    let start = Deviation { loss: 0.0, grad_norm: 0.0 };
    all.iter().fold(start, |so_far, (_, one)| Deviation {
        loss: larger(so_far.loss, one.loss),
        grad_norm: larger(so_far.grad_norm, one.grad_norm),
    })
}

fn relative(ours: f64, theirs: f64) -> f64 {
    if ours == theirs { 0.0 } else { (ours - theirs).abs() / theirs.abs() }
}

/// The larger one, and no number where one is none.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_never_near() {
        let tolerance = Tolerance { loss: 1.0, grad_norm: 1.0 };
        let of = |loss, grad_norm| {
            largest(&[(1, Deviation { loss, grad_norm }), (2, Deviation { loss: 0.0, grad_norm: 0.5 })])
        };
        assert!(of(0.5, 0.1).within(tolerance));
        assert_eq!(of(0.5, 0.1), Deviation { loss: 0.5, grad_norm: 0.5 });
        assert!(!of(f64::NAN, 0.0).within(tolerance));
        assert!(!of(f64::INFINITY, 0.0).within(tolerance));
        assert!(!of(0.0, 1.5).within(tolerance));
        assert_eq!(relative(f64::INFINITY, f64::INFINITY), 0.0);
        assert!(relative(1.0, f64::NAN).is_nan());
    }
}
