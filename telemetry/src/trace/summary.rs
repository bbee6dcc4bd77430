//! Where the steps' time went.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{RankTrace, SlowRank, Span, Trace, Track, Waits, slow_rank};
use crate::Place;

/// Where the steps' time went, by rank.
#[derive(Clone, PartialEq, Debug)]
pub struct Summary {
    /// One a rank, in the order of the ranks.
    pub ranks: Vec<RankSummary>,
    /// The rank that the others wait for.
    pub slow: Option<SlowRank>,
}

/// Where the time of one rank's steps went. The parts add up to the whole.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RankSummary {
    /// Which rank.
    pub place: Place,
    /// How many steps the trace has.
    pub steps: u64,
    /// All that they took.
    pub total: Duration,
    /// Forward and backward passes and the optimizer.
    pub compute: Duration,
    /// Standing still for collectives, and for messages that are not the pipeline's, by the group's name.
    pub exposed: BTreeMap<String, Duration>,
    /// Standing still for what the stages of a pipeline send each other.
    pub bubble: Duration,
    /// Waiting for data.
    pub data: Duration,
    /// All else: checkpoints, validation, what no span covers.
    pub other: Duration,
    /// How many spans there was no room for.
    pub dropped: u64,
}

/// Adds up where the time of all steps of a trace went. Every moment of a step counts for the innermost span that covers
/// it.
pub fn summary(trace: &Trace) -> Summary {
    let ranks: Vec<RankSummary> = trace.ranks.iter().map(of_rank).collect();
    let waits = |rank: &RankSummary| {
        let mut by_group = rank.exposed.clone();
        let pipeline = by_group.entry(PIPELINE.to_owned()).or_default();
        *pipeline = pipeline.saturating_add(rank.bubble);
        Waits { place: rank.place.clone(), by_group }
    };
    let slow = slow_rank(&ranks.iter().map(waits).collect::<Vec<_>>());
    Summary { ranks, slow }
}

/// The group of the stages of a pipeline.
const PIPELINE: &str = "pp";

/// What a moment counts for.
#[derive(Clone, Copy)]
enum Part<'a> {
    Compute,
    Exposed(&'a str),
    Bubble,
    Data,
    Other,
}

impl<'a> Part<'a> {
    /// What a span counts for; `None` for what its surroundings do.
    fn of(span: &'a Span) -> Option<Self> {
        if span.track == Track::Pipeline {
            return Some(Part::Compute);
        }
        match &*span.name {
            "forward" | "backward" | "optimizer" => Some(Part::Compute),
            "data" => Some(Part::Data),
            Span::STEP | "checkpoint" | "validation" => Some(Part::Other),
            Span::WAIT => {
                let group = span.text("group")?;
                let is_message = matches!(span.text("op"), Some("send" | "recv"));
                Some(if group == PIPELINE && is_message { Part::Bubble } else { Part::Exposed(group) })
            }
            _ => None,
        }
    }
}

fn of_rank(rank: &RankTrace) -> RankSummary {
    let mut spans: Vec<&Span> =
        rank.spans.iter().filter(|span| !matches!(span.track, Track::Communication(_))).collect();
    spans.sort_by_key(|span| (span.begin, std::cmp::Reverse(span.end)));
    let mut summary = RankSummary { place: rank.place.clone(), dropped: rank.dropped, ..RankSummary::default() };
    // Steps do not overlap; where a broken trace says so, the later one begins when the earlier has ended.
    let mut done = i64::MIN;
    for step in spans.iter().filter(|span| span.name == Span::STEP) {
        let (begin, end) = (step.begin.max(done), step.end);
        if begin >= end {
            continue;
        }
        done = end;
        summary.steps += 1;
        summary.total = summary.total.saturating_add(between(begin, end));
        let first = spans.partition_point(|span| span.begin < begin);
        let inside = spans[first..].iter().take_while(|span| span.begin < end);
        // What began earlier and is not over counts too.
        let around = spans[..first].iter().filter(|span| span.end > begin);
        summary.add_step(begin, end, around.chain(inside).copied());
    }
    summary
}

impl RankSummary {
    /// Goes along a step, from the beginning of one span to the next, with the spans that cover the moment on a stack.
    fn add_step<'a>(&mut self, begin: i64, end: i64, spans: impl Iterator<Item = &'a Span>) {
        let mut at = begin;
        let mut stack: Vec<(i64, Part<'a>)> = Vec::new();
        for span in spans {
            let start = span.begin.max(begin);
            while let Some(&(until, part)) = stack.last()
                && until <= start
            {
                stack.pop();
                self.add(part, at, until);
                at = at.max(until);
            }
            let (until, surroundings) = stack.last().copied().unwrap_or((end, Part::Other));
            self.add(surroundings, at, start);
            at = at.max(start);
            // No span outlasts the one that it began in.
            stack.push((span.end.min(until), Part::of(span).unwrap_or(surroundings)));
        }
        while let Some((until, part)) = stack.pop() {
            self.add(part, at, until);
            at = at.max(until);
        }
        self.add(Part::Other, at, end);
    }

    fn add(&mut self, part: Part<'_>, begin: i64, end: i64) {
        if end <= begin {
            return;
        }
        let sum = match part {
            Part::Compute => &mut self.compute,
            Part::Exposed(group) => self.exposed.entry(group.to_owned()).or_default(),
            Part::Bubble => &mut self.bubble,
            Part::Data => &mut self.data,
            Part::Other => &mut self.other,
        };
        *sum = sum.saturating_add(between(begin, end));
    }
}

fn between(begin: i64, end: i64) -> Duration {
    Duration::from_nanos(u64::try_from(end.saturating_sub(begin)).unwrap_or(0))
}
