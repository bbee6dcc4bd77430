//! Timelines in letters.

use super::{figures, number, scale, tick};
use crate::action::Step;
use crate::timeline::{Span, Timeline};

/// The widest row. Spans too short for their name in it show the start of it, or nothing.
const MAX_COLUMNS: f64 = 2000.0;

/// Fewest columns between two ticks.
const TICK: f64 = 8.0;

/// A row for each rank, under a time axis: a step is its text and as many `-` as it lasts, idle time is dots. Columns
/// are wide enough for the shortest step, so a line can be long. Microbatches stand after the letter of the kind,
/// stages before it, as in a CSV; overlapped pairs are `0F3;3B1`.
pub fn text(timeline: &Timeline) -> String {
    let ranks = timeline.ranks();
    let makespan = timeline.makespan();
    let widest = scale(MAX_COLUMNS, makespan);
    // Columns for a unit of time.
    let scale = ranks
        .iter()
        .flatten()
        .filter(|span| span.end > span.start)
        .map(|span| (name(span.step).len() + 1) as f64 / (span.end - span.start))
        .fold(0.0, f64::max)
        .min(widest);
    let columns = column(makespan, scale);

    let margin = format!("rank {}  ", ranks.len().saturating_sub(1)).len();
    let mut picture = format!("{}: {}\n", timeline.name().replace(char::is_control, " "), figures(timeline));
    picture.push_str(&" ".repeat(margin));
    picture.push_str(axis(makespan, scale, columns).trim_end());
    picture.push('\n');
    for (rank, spans) in ranks.iter().enumerate() {
        let label = format!("rank {rank}");
        picture.push_str(&format!("{label:margin$}{}\n", row(spans, scale, columns).trim_end()));
    }
    picture
}

fn name(step: Step) -> String {
    match step {
        Step::One(action) => action.to_string(),
        Step::Pair { forward, backward } => format!("{forward};{backward}"),
    }
}

fn column(time: f64, scale: f64) -> usize {
    (time * scale).round() as usize
}

fn row(spans: &[Span], scale: f64, columns: usize) -> String {
    let mut row = vec![b'.'; columns];
    for span in spans {
        let cells = &mut row[column(span.start, scale)..column(span.end, scale)];
        // The last column parts it from what follows.
        let Some((last, cells)) = cells.split_last_mut() else { continue };
        *last = b' ';
        cells.fill(b'-');
        for (cell, letter) in cells.iter_mut().zip(name(span.step).bytes()) {
            *cell = letter;
        }
    }
    String::from_utf8_lossy(&row).into_owned()
}

fn axis(makespan: f64, scale: f64, columns: usize) -> String {
    let mut axis = String::new();
    if columns == 0 {
        return axis;
    }
    let between = tick(TICK / scale);
    for time in (0..).map(|at| f64::from(at) * between).take_while(|&time| time <= makespan) {
        let at = column(time, scale);
        // A long number may reach into the next tick's place; then that is left out.
        if axis.is_empty() || axis.len() < at {
            axis.push_str(&" ".repeat(at - axis.len()));
            axis.push_str(&number(time));
        }
    }
    axis
}
