//! The results as text.

use super::results::{CellResult, Results, Verdict};
use crate::metrics::in_units as bytes;
use std::fmt::Write as _;

/// A deviation.
pub(super) fn deviation(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{value:.1e}") }
}

/// Per cent, with its sign.
pub(super) fn percent(value: f64) -> String {
    format!("{value:+.1} %")
}

/// What a cell's row says after its name.
pub(super) fn row(cell: &CellResult) -> [String; 7] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    [
        cell.ranks.to_string(),
        or_dash(cell.deviation.map(|found| deviation(found.loss))),
        or_dash(cell.deviation.map(|found| deviation(found.grad_norm))),
        or_dash(cell.cost.as_ref().map(|cost| format!("{:.0}", cost.tokens_per_second))),
        or_dash(cell.cost.as_ref().map(|cost| bytes(cost.peak_memory as f64))),
        or_dash(cell.cost.as_ref().map(|cost| bytes(cost.bytes_per_step()))),
        if cell.is_reference && cell.verdict == Verdict::Ran { "reference" } else { cell.verdict.word() }.to_owned(),
    ]
}

/// The heads of the columns.
pub(super) const COLUMNS: [&str; 8] =
    ["cell", "ranks", "loss off by", "grad norm off by", "tokens/s", "peak memory", "sent a step", ""];

/// A table of the cells, one of the effects, and what failed.
pub(crate) fn render(results: &Results) -> String {
    let mut rows: Vec<Vec<String>> = vec![COLUMNS.map(str::to_owned).to_vec()];
    for cell in &results.cells {
        rows.push(std::iter::once(cell.name.clone()).chain(row(cell)).collect());
    }
    let mut out = aligned(&rows);
    if !results.effects.is_empty() {
        let mut rows = vec![
            ["by itself", "pairs", "time of a step", "peak memory", "state of a rank", "sent a step"]
                .map(str::to_owned)
                .to_vec(),
        ];
        for effect in &results.effects {
            rows.push(vec![
                effect_name(&effect.axis, &effect.value, &effect.against),
                effect.pairs.to_string(),
                percent(effect.time_percent),
                percent(effect.memory_percent),
                percent(effect.state_percent),
                bytes(effect.bytes_per_step),
            ]);
        }
        out.push('\n');
        out.push_str(&aligned(&rows));
    }
    out.push_str(&failures(results));
    out
}

/// What an effect is of.
pub(super) fn effect_name(axis: &str, value: &str, against: &str) -> String {
    match (value, against) {
        ("on", "off") => axis.to_owned(),
        _ => format!("{axis}: {value} instead of {against}"),
    }
}

/// What a sentence says of all cells.
pub(super) fn verdict(results: &Results) -> String {
    let count = |verdict: Verdict| results.cells.iter().filter(|cell| cell.verdict == verdict).count();
    let kinds = [Verdict::Same, Verdict::Deviates, Verdict::Failed, Verdict::Missing, Verdict::Left];
    let counted: Vec<String> = kinds
        .into_iter()
        .filter(|kind| count(*kind) > 0)
        .map(|kind| format!("{} {}", count(kind), kind.word().to_lowercase()))
        .collect();
    let cells = results.cells.iter().filter(|cell| !cell.is_reference).count();
    let counted = if counted.is_empty() { "all ran".to_owned() } else { counted.join(", ") };
    format!("{cells} cells: {counted}")
}

fn failures(results: &Results) -> String {
    let mut out = String::new();
    for cell in results.bad() {
        let why = match (&cell.why, cell.deviation, cell.tolerance) {
            (Some(why), _, _) => why.clone(),
            (None, Some(found), Some(tolerance)) => format!(
                "loss off by {} (at most {:.0e}), gradient norm by {} (at most {:.0e})",
                deviation(found.loss),
                tolerance.loss,
                deviation(found.grad_norm),
                tolerance.grad_norm
            ),
            _ => String::new(),
        };
        let _ = writeln!(out, "\n{} {}: {why}", cell.verdict.word(), cell.name);
        for line in cell.last_lines.lines() {
            let _ = writeln!(out, "    {line}");
        }
    }
    if !results.suspects.is_empty() {
        let _ = writeln!(out, "\nevery failing cell has this, and no other cell: {}", results.suspects.join(", "));
    }
    let _ = writeln!(out, "\n{}", verdict(results));
    out
}

/// Columns, the first to the left, the others to the right.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (text, &width))| match column {
            0 => format!("{text:<width$}"),
            _ => format!("{text:>width$}"),
        });
        out.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        out.push('\n');
    }
    out
}
