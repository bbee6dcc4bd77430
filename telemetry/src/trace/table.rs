//! A summary as a table of text.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use super::{RankSummary, Summary};

/// Milliseconds a step, and their share of the step.
fn cell(part: Duration, rank: &RankSummary) -> String {
    let total = rank.total.as_secs_f64();
    let share = if total > 0.0 { 100.0 * part.as_secs_f64() / total } else { 0.0 };
    format!("{} ({share:.0} %)", milliseconds(part, rank.steps))
}

fn milliseconds(part: Duration, steps: u64) -> String {
    format!("{:.2}", 1e3 * part.as_secs_f64() / steps.max(1) as f64)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.ranks.iter().map(|rank| rank.steps).max().unwrap_or(0);
        if steps == 0 {
            return writeln!(f, "the trace has no step");
        }
        let groups: BTreeSet<&String> = self.ranks.iter().flat_map(|rank| rank.exposed.keys()).collect();
        writeln!(f, "milliseconds a step, over {steps} steps")?;
        let mut rows = vec![vec!["rank".to_owned(), "step".to_owned(), "compute".to_owned()]];
        rows[0].extend(groups.iter().map(|group| format!("wait {group}")));
        rows[0].extend(["bubble", "data", "other"].map(str::to_owned));
        for rank in &self.ranks {
            let mut row = vec![rank.place.to_string(), milliseconds(rank.total, rank.steps), cell(rank.compute, rank)];
            let exposed = groups.iter().map(|group| rank.exposed.get(*group).copied().unwrap_or_default());
            row.extend(exposed.chain([rank.bubble, rank.data, rank.other]).map(|part| cell(part, rank)));
            rows.push(row);
        }
        let columns = rows[0].len();
        let widths: Vec<usize> =
            (0..columns).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
        for row in &rows {
            let padded = row.iter().zip(&widths).enumerate().map(|(column, (text, &width))| match column {
                0 => format!("{text:<width$}"),
                _ => format!("{text:>width$}"),
            });
            writeln!(f, "{}", padded.collect::<Vec<_>>().join("  "))?;
        }
        let dropped: u64 = self.ranks.iter().map(|rank| rank.dropped).sum();
        if dropped > 0 {
            writeln!(f, "{dropped} spans were not kept: what they covered counts for what was around them")?;
        }
        let Some(slow) = &self.slow else { return Ok(()) };
        writeln!(f, "the others wait for {}:", slow.place)?;
        for turn in &slow.path {
            let (waits, others) = (milliseconds(turn.waits, steps), milliseconds(turn.others, steps));
            let (dimension, index) = (&turn.dimension, turn.index);
            writeln!(f, "  along {dimension}, {index} waits {waits} ms a step, the others {others} ms")?;
        }
        Ok(())
    }
}
