//! When each step ran: simulated, or measured.

use crate::action::Step;
use crate::error::{Error, Result};

/// Sums and differences of many times this large are still finite.
const MAX_TIME: f64 = 1e250;

/// When a step ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// What ran.
    pub step: Step,
    /// When it started, in the timeline's unit.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// When each step of each rank ran. The first started at 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    name: String,
    unit: String,
    ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// A timeline of measured spans, each rank's in the order in which they ran. All ranks' clocks must agree; times
    /// are shifted so that the first span starts at 0.
    ///
    /// `name` and `unit` (as `ms`, or nothing) appear in pictures.
    ///
    /// # Errors
    /// [`Error::Span`] for a span whose times are not finite or absurdly large, that ends before it starts, or starts
    /// before the one before it ended.
    pub fn new(name: impl Into<String>, unit: impl Into<String>, mut ranks: Vec<Vec<Span>>) -> Result<Self> {
        for (rank, spans) in ranks.iter().enumerate() {
            let mut free_at = f64::NEG_INFINITY;
            for &Span { step, start, end } in spans {
                let reason = match () {
                    () if !(start.abs() <= MAX_TIME && end.abs() <= MAX_TIME) => "give times below 1e250",
                    () if end < start => "it must not end before it starts",
                    () if start < free_at => "it must not start before the rank's previous step has ended",
                    () => {
                        free_at = end;
                        continue;
                    }
                };
                return Err(Error::Span { rank, step, start, end, reason });
            }
        }
        let origin =
            ranks.iter().filter_map(|spans| spans.first()).map(|span| span.start).fold(f64::INFINITY, f64::min);
        for span in ranks.iter_mut().flatten() {
            span.start -= origin;
            span.end -= origin;
        }
        Ok(Self { name: name.into(), unit: unit.into(), ranks })
    }

    /// What ran.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The unit of time, or nothing.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    /// Each rank's spans, in order.
    pub fn ranks(&self) -> &[Vec<Span>] {
        &self.ranks
    }

    /// When the last step ended.
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().filter_map(|spans| spans.last()).map(|span| span.end).fold(0.0, f64::max)
    }

    /// How long a rank worked.
    pub fn busy(&self, rank: usize) -> f64 {
        self.ranks.get(rank).into_iter().flatten().map(|span| span.end - span.start).sum()
    }

    /// The makespan if nobody ever waited: how long the busiest rank worked.
    pub fn ideal(&self) -> f64 {
        (0..self.ranks.len()).map(|rank| self.busy(rank)).fold(0.0, f64::max)
    }

    /// What waiting costs: the makespan less the ideal.
    pub fn bubble(&self) -> f64 {
        self.makespan() - self.ideal()
    }

    /// The bubble as a share of the ideal, as papers give it. 0 where nothing takes time.
    pub fn bubble_ratio(&self) -> f64 {
        let ideal = self.ideal();
        if ideal > 0.0 { self.bubble() / ideal } else { 0.0 }
    }

    /// The share of all ranks' time that is idle. 0 where nothing takes time.
    pub fn idle_share(&self) -> f64 {
        let total = self.makespan() * self.ranks.len() as f64;
        let busy: f64 = (0..self.ranks.len()).map(|rank| self.busy(rank)).sum();
        if total > 0.0 { (1.0 - busy / total).max(0.0) } else { 0.0 }
    }
}
