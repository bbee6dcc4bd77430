//! All results: `results.json` is this.

use super::cell::{Cell, Tolerance};
use super::compare::{self, Deviation};
use super::effects::{self, Effect};
use super::measure::Measured;
use super::pool::Ran;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// What is to be said of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// As near to its reference as it has to be.
    Same,
    /// Farther away.
    Deviates,
    /// It did not end well, or what it wrote is not whole.
    Failed,
    /// It ended well, and there is nothing to compare it with.
    Ran,
    /// No run can be it, and the matrix says so.
    Left,
    /// It was not run yet.
    Missing,
}

impl Verdict {
    /// In a word.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Deviates => "DEVIATES",
            Self::Failed => "FAILED",
            Self::Ran => "ran",
            Self::Left => "left out",
            Self::Missing => "not run",
        }
    }

    /// Whether the matrix fails for it.
    pub(crate) fn is_bad(self) -> bool {
        matches!(self, Self::Deviates | Self::Failed | Self::Missing)
    }
}

/// What a cell took.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cost {
    /// Of the whole mesh.
    pub(crate) tokens_per_second: f64,
    /// Bytes, at its peak, of the process of the first rank: all ranks where they are threads.
    pub(crate) peak_memory: u64,
    /// Bytes of parameters, gradients and optimizer state, of the rank that holds most.
    pub(crate) state_bytes: u64,
    /// Bytes that the first rank sent, by the group of ranks that they went through.
    pub(crate) bytes_sent: BTreeMap<String, u64>,
    /// Steps of the run that these bytes are of.
    pub(crate) steps: u64,
}

impl Cost {
    /// Bytes that the first rank sent in a step.
    pub(crate) fn bytes_per_step(&self) -> f64 {
        self.bytes_sent.values().sum::<u64>() as f64 / self.steps.max(1) as f64
    }
}

/// A step of a curve.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Point {
    pub(crate) step: u64,
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) deviation: Option<Deviation>,
}

/// All of a cell.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CellResult {
    pub(crate) name: String,
    pub(crate) is_reference: bool,
    pub(crate) values: Vec<(String, String)>,
    pub(crate) settings: Vec<String>,
    pub(crate) ranks: usize,
    pub(crate) verdict: Verdict,
    pub(crate) reference: Option<String>,
    pub(crate) tolerance: Option<Tolerance>,
    pub(crate) deviation: Option<Deviation>,
    pub(crate) cost: Option<Cost>,
    /// Seconds that all its runs took, with their start and end.
    pub(crate) seconds: Option<f64>,
    pub(crate) curve: Vec<Point>,
    /// Why it failed or was left out, and the end of its output.
    pub(crate) why: Option<String>,
    pub(crate) last_lines: String,
}

/// All of a matrix.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Results {
    pub(crate) matrix: String,
    pub(crate) version: &'static str,
    pub(crate) cells: Vec<CellResult>,
    pub(crate) effects: Vec<Effect>,
    /// Values of axes that every failing cell has and no passing one.
    pub(crate) suspects: Vec<String>,
}

impl Results {
    /// Reads what the cells wrote, and compares them. `ran` says what became of each.
    pub(crate) fn new(matrix: &str, cells: &[Cell], ran: &[Ran], out: &Path) -> Self {
        let measured: Vec<Option<Result<Measured, String>>> = cells
            .iter()
            .zip(ran)
            .map(|(cell, ran)| {
                matches!(ran, Ran::Well { .. }).then(|| Measured::read(&out.join(cell.folder()), cell.steps()))
            })
            .collect();
        let reference = |name: &str| {
            let index = cells.iter().position(|cell| cell.is_reference && cell.name == name)?;
            measured[index].as_ref()?.as_ref().ok()
        };
        let cells: Vec<CellResult> = cells
            .iter()
            .zip(ran)
            .zip(&measured)
            .map(|((cell, ran), measured)| {
                let against = cell.reference.as_deref().map(|name| reference(name).ok_or(name));
                result(cell, ran, measured.as_ref(), against)
            })
            .collect();
        let (effects, suspects) = (effects::main_effects(&cells), effects::suspects(&cells));
        Self { matrix: matrix.to_owned(), version: env!("CARGO_PKG_VERSION"), cells, effects, suspects }
    }

    /// Cells for which the matrix fails.
    pub(crate) fn bad(&self) -> impl Iterator<Item = &CellResult> {
        self.cells.iter().filter(|cell| cell.verdict.is_bad())
    }
}

fn result(
    cell: &Cell,
    ran: &Ran,
    measured: Option<&Result<Measured, String>>,
    reference: Option<Result<&Measured, &str>>,
) -> CellResult {
    let mut result = CellResult {
        name: cell.name.clone(),
        is_reference: cell.is_reference,
        values: cell.values.clone(),
        settings: cell
            .runs
            .iter()
            .map(|run| run.iter().map(|flag| flag.text.as_str()).collect::<Vec<_>>().join(" "))
            .collect(),
        ranks: cell.ranks(),
        verdict: Verdict::Missing,
        reference: cell.reference.clone(),
        tolerance: cell.tolerance,
        deviation: None,
        cost: None,
        seconds: None,
        curve: Vec::new(),
        why: None,
        last_lines: String::new(),
    };
    let failed = |result: CellResult, why: String| CellResult { verdict: Verdict::Failed, why: Some(why), ..result };
    match ran {
        Ran::Left => return CellResult { verdict: Verdict::Left, why: cell.illegal.clone(), ..result },
        Ran::Missing => return result,
        Ran::Failed { why, lines } => {
            result.last_lines.clone_from(lines);
            return failed(result, why.clone());
        }
        Ran::Well { took, .. } => result.seconds = Some(took.as_secs_f64()),
    }
    let measured = match measured {
        Some(Ok(measured)) => measured,
        Some(Err(why)) => return failed(result, why.clone()),
        None => return result,
    };
    let first = cell.plans.iter().rev().nth(1).map_or(0, |plan| plan.steps);
    result.cost = Some(Cost {
        tokens_per_second: measured.tokens_per_second(),
        peak_memory: measured.summary.peak_memory,
        state_bytes: measured.summary.state_bytes,
        bytes_sent: measured.summary.bytes_sent.clone(),
        steps: cell.steps().saturating_sub(first),
    });
    let deviations = match reference {
        None => None,
        Some(Err(name)) => return failed(result, format!("its reference {name} failed")),
        Some(Ok(reference)) => match compare::by_step(measured, reference) {
            Ok(deviations) => Some(deviations),
            Err(why) => return failed(result, why),
        },
    };
    let of_step = |number: &u64| deviations.as_ref()?.iter().find(|(step, _)| step == number).map(|(_, one)| *one);
    let point = |(step, values): (&u64, &super::measure::Step)| Point {
        step: *step,
        loss: values.loss,
        grad_norm: values.grad_norm,
        deviation: of_step(step),
    };
    result.curve = measured.steps.iter().map(point).collect();
    result.deviation = deviations.as_deref().map(compare::largest);
    result.verdict = match (result.deviation, cell.tolerance) {
        (Some(deviation), Some(tolerance)) if deviation.within(tolerance) => Verdict::Same,
        (Some(_), _) => Verdict::Deviates,
        (None, _) => Verdict::Ran,
    };
    result
}
