//! What the live view shows.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::metrics::table::{LOSS, Sample, THROUGHPUT};
use crate::report::Phase;

/// The most points of the loss curve. When there are more, every other one goes.
const CURVE: usize = 2048;
/// The last so many throughputs.
const RATES: usize = 512;
/// The last so many log lines.
const LINES: usize = 512;

/// What the live view shows of a run. Clones share it, and any thread may write into it.
#[derive(Clone, Debug)]
pub struct View(Arc<Mutex<State>>);

/// What a rank does now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankState {
    /// Where it is on the mesh, such as `pp 1, tp 0`.
    pub place: String,
    /// The step that it is in.
    pub step: u64,
    /// What it does in it.
    pub phase: Phase,
    /// Its last collective, such as `all-reduce #182 on tp`.
    pub collective: String,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) title: String,
    pub(super) steps: u64,
    pub(super) step: u64,
    pub(super) began: Instant,
    /// Step and loss, thinned out evenly.
    pub(super) losses: Vec<(f64, f64)>,
    /// Every how-manieth step is on the curve.
    stride: u64,
    pub(super) rates: VecDeque<f64>,
    /// The last value of each metric that has no dimension, by its name.
    pub(super) values: BTreeMap<&'static str, f64>,
    /// What each rank does, and since when.
    pub(super) ranks: BTreeMap<usize, (RankState, Instant)>,
    pub(super) lines: VecDeque<String>,
    pub(super) open: bool,
}

impl View {
    /// Of a run with this title and so many steps.
    pub fn new(title: impl Into<String>, steps: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            title: title.into(),
            steps,
            step: 0,
            began: Instant::now(),
            losses: Vec::new(),
            stride: 1,
            rates: VecDeque::new(),
            values: BTreeMap::new(),
            ranks: BTreeMap::new(),
            lines: VecDeque::new(),
            open: false,
        })))
    }

    /// Shows a step. [`RankMetrics::step`](crate::metrics::RankMetrics::step) does so where the options name this view.
    pub fn step(&self, step: u64, samples: &[Sample]) {
        let mut state = self.state();
        state.step = step;
        for sample in samples.iter().filter(|sample| sample.dimension.is_none()) {
            state.values.insert(sample.metric.name, sample.value);
            if sample.metric == LOSS {
                state.add_loss(step, sample.value);
            } else if sample.metric == THROUGHPUT {
                push(&mut state.rates, RATES, sample.value);
            }
        }
    }

    /// Shows what a rank does. It counts as doing it since the first time that it was said.
    pub fn rank(&self, rank: usize, now: RankState) {
        let mut state = self.state();
        match state.ranks.get(&rank) {
            Some((before, _)) if *before == now => {}
            _ => drop(state.ranks.insert(rank, (now, Instant::now()))),
        }
    }

    /// Shows a log line while the view is open. False if it is not: the line is the caller's to print.
    pub fn line(&self, line: &str) -> bool {
        let mut state = self.state();
        if state.open {
            push(&mut state.lines, LINES, plain(line));
        }
        state.open
    }

    #[cfg(feature = "tui")]
    pub(super) fn set_open(&self, open: bool) {
        self.state().open = open;
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // It is consistent between statements.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add_loss(&mut self, step: u64, loss: f64) {
        if !(loss.is_finite() && step.is_multiple_of(self.stride)) {
            return;
        }
        self.losses.push((step as f64, loss));
        if self.losses.len() >= CURVE {
            self.stride *= 2;
            let stride = self.stride;
            self.losses.retain(|(step, _)| (*step as u64).is_multiple_of(stride));
        }
    }
}

fn push<T>(queue: &mut VecDeque<T>, most: usize, value: T) {
    if queue.len() == most {
        queue.pop_front();
    }
    queue.push_back(value);
}

/// A line without what would move the cursor or color the terminal.
fn plain(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line.chars();
    while let Some(c) = rest.next() {
        if c == '\x1b' {
            // An escape sequence `ESC [ … letter`; of others, two characters.
            if rest.next() == Some('[') {
                let _ = rest.find(|c| ('\x40'..='\x7e').contains(c));
            }
        } else if c == '\t' {
            out.push(' ');
        } else if !c.is_control() {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::metrics::table::COMM_BYTES;

    #[test]
    fn the_curve_keeps_its_ends_and_stays_small() {
        let view = View::new("", 100_000);
        for step in 1..=100_000_u64 {
            view.step(step, &[LOSS.is(1.0 / step as f64), COMM_BYTES.on("tp", 1.0)]);
        }
        view.step(100_001, &[LOSS.is(f64::NAN)]);
        let state = view.state();
        assert!(state.losses.len() < CURVE && state.losses.len() > CURVE / 4, "{}", state.losses.len());
        assert!(state.losses[0].0 < 200.0 && state.losses.last().unwrap().0 > 99_800.0);
        assert!(state.losses.iter().all(|(step, loss)| *loss == 1.0 / step));
        assert!(state.values["ferrotitan_loss"].is_nan());
        assert!(!state.values.contains_key("ferrotitan_comm_sent_bytes"));
    }

    #[test]
    fn a_rank_does_something_since_it_began_to() {
        let view = View::new("", 1);
        let doing = |phase| RankState { phase, ..RankState::default() };
        view.rank(1, doing(Phase::Forward));
        let since = view.state().ranks[&1].1;
        view.rank(1, doing(Phase::Forward));
        assert_eq!(view.state().ranks[&1].1, since);
        std::thread::sleep(std::time::Duration::from_millis(1));
        view.rank(1, doing(Phase::Backward));
        assert!(view.state().ranks[&1].1 > since);
    }

    #[test]
    fn lines_are_the_callers_until_the_view_is_open() {
        let view = View::new("", 1);
        assert!(!view.line("before"));
        view.state().open = true;
        assert!(view.line("\x1b[31mred\x1b[39m\tand\r \x1b]plain\x07"));
        assert_eq!(view.state().lines, ["red and plain"]);
        for number in 0..2 * LINES {
            view.line(&number.to_string());
        }
        assert_eq!(view.state().lines.len(), LINES);
    }
}
