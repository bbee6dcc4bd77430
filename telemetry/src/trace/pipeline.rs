//! The pipeline's schedule as it was executed, for a picture.

use super::{RankTrace, Span, Trace, Track};

/// One computation of a stage on a microbatch.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// The place along the dimension `pp`.
    pub rank: usize,
    /// What ran, in the words of a schedule: `2F0`.
    pub action: String,
    /// When it began, in seconds after the first of all.
    pub begin: f64,
    /// When it ended.
    pub end: f64,
}

/// What the pipeline's ranks computed in the `number`th step of the trace, from 0, by rank and time: of the ranks along
/// `pp` whose other coordinates are 0.
pub fn pipeline_rows(trace: &Trace, number: usize) -> Vec<Row> {
    let first = |rank: &&RankTrace| rank.place.coordinates.iter().all(|c| c.index == 0 || c.dimension == "pp");
    let mut rows: Vec<(usize, &Span)> = Vec::new();
    for rank in trace.ranks.iter().filter(first) {
        let mut steps: Vec<&Span> = rank.spans.iter().filter(|span| span.name == Span::STEP).collect();
        steps.sort_by_key(|step| step.begin);
        let Some(step) = steps.get(number) else { continue };
        let within = |span: &&Span| span.track == Track::Pipeline && step.begin <= span.begin && span.end <= step.end;
        rows.extend(rank.spans.iter().filter(within).map(|span| (rank.place.index("pp"), span)));
    }
    rows.sort_by_key(|(rank, span)| (*rank, span.begin, span.end));
    let zero = rows.iter().map(|(_, span)| span.begin).min().unwrap_or(0);
    let seconds = |time: i64| time.saturating_sub(zero) as f64 / 1e9;
    let row = |(rank, span): (usize, &Span)| Row {
        rank,
        action: span.name.to_string(),
        begin: seconds(span.begin),
        end: seconds(span.end),
    };
    rows.into_iter().map(row).collect()
}
