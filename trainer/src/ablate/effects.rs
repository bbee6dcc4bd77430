//! What each axis does by itself, and which axis those that deviate have in common.

use super::results::{CellResult, Verdict};
use serde::Serialize;
use std::collections::BTreeSet;

/// What a value of an axis changes against the axis's first value, as the mean over all pairs of cells that differ in
/// nothing else.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Effect {
    pub(crate) axis: String,
    pub(crate) value: String,
    pub(crate) against: String,
    /// Over how many pairs.
    pub(crate) pairs: usize,
    /// Time of a step, per cent more.
    pub(crate) time_percent: f64,
    /// Peak memory of a process, per cent more.
    pub(crate) memory_percent: f64,
    /// Parameters, gradients and optimizer state of the rank that holds most, per cent more.
    pub(crate) state_percent: f64,
    /// Bytes that the first rank sends in a step, more.
    pub(crate) bytes_per_step: f64,
}

/// The effects of all axes, in the order of the matrix.
pub(super) fn main_effects(cells: &[CellResult]) -> Vec<Effect> {
    let mut effects = Vec::new();
    let Some(axes) = cells.iter().map(|cell| &cell.values).find(|values| !values.is_empty()) else { return effects };
    for (index, (axis, _)) in axes.iter().enumerate() {
        let mut values: Vec<&str> = Vec::new();
        for cell in cells.iter().filter(|cell| !cell.values.is_empty()) {
            let value = cell.values[index].1.as_str();
            if !values.contains(&value) {
                values.push(value);
            }
        }
        for value in values.iter().skip(1) {
            effects.extend(effect(cells, index, axis, value, values[0]));
        }
    }
    effects
}

fn effect(cells: &[CellResult], index: usize, axis: &str, value: &str, against: &str) -> Option<Effect> {
    let of = |value: &str| -> Vec<&CellResult> {
        cells.iter().filter(|cell| cell.values.get(index).is_some_and(|(_, own)| own == value)).collect()
    };
    let without = of(against);
    let mut sums = [0.0; 4];
    let mut pairs = 0;
    for with in of(value) {
        let same = |other: &&&CellResult| {
            let mut pairs = with.values.iter().zip(&other.values).enumerate();
            pairs.all(|(place, (ours, theirs))| place == index || ours == theirs)
        };
        let Some(other) = without.iter().find(same) else { continue };
        let (Some(with), Some(other)) = (&with.cost, &other.cost) else { continue };
        pairs += 1;
        sums[0] += (other.tokens_per_second / with.tokens_per_second).ln();
        sums[1] += (with.peak_memory as f64 / other.peak_memory as f64).ln();
        sums[2] += (with.state_bytes as f64 / other.state_bytes as f64).ln();
        sums[3] += with.bytes_per_step() - other.bytes_per_step();
    }
    let mean = |sum: f64| sum / pairs as f64;
    let percent = |sum: f64| 100.0 * mean(sum).exp_m1();
    (pairs > 0).then(|| Effect {
        axis: axis.to_owned(),
        value: value.to_owned(),
        against: against.to_owned(),
        pairs,
        time_percent: percent(sums[0]),
        memory_percent: percent(sums[1]),
        state_percent: percent(sums[2]),
        bytes_per_step: mean(sums[3]),
    })
}

/// The values of axes that every failing cell has and no passing one: what to look at first.
pub(super) fn suspects(cells: &[CellResult]) -> Vec<String> {
    let of = |bad: bool| -> Vec<&CellResult> {
        let counts = |cell: &&CellResult| match cell.verdict {
            Verdict::Same => !bad,
            Verdict::Deviates | Verdict::Failed => bad,
            Verdict::Ran | Verdict::Left | Verdict::Missing => false,
        };
        cells.iter().filter(|cell| !cell.values.is_empty()).filter(counts).collect()
    };
    let (bad, good) = (of(true), of(false));
    let Some(first) = bad.first() else { return Vec::new() };
    let has = |cell: &CellResult, pair: &(String, String)| cell.values.contains(pair);
    let mut common: BTreeSet<&(String, String)> = first.values.iter().collect();
    common.retain(|pair| bad.iter().all(|cell| has(cell, pair)) && !good.iter().any(|cell| has(cell, pair)));
    common
        .into_iter()
        .map(|(axis, value)| if value == "on" { axis.clone() } else { format!("{axis}={value}") })
        .collect()
}
