//! What a rank's units did and when, and how much was gathered.

use std::collections::VecDeque;
use std::time::Instant;

/// How many events are kept.
const CAPACITY: usize = 16_384;

/// Something that a unit did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Its shards are on their way to the other ranks. From here on it counts as gathered.
    GatherStarted,
    /// Its parameters are there.
    Gathered,
    /// Its parameters' memory has been given back.
    Released,
    /// A layer of it begins its forward.
    Forward,
    /// A layer of it begins its backward.
    Backward,
    /// Its gradients are on their way.
    ReduceStarted,
    /// Its gradients have been added to those of the shards.
    Reduced,
}

/// Something that happened to a unit.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// The unit's number.
    pub unit: usize,
    /// What happened.
    pub what: What,
    /// When it began.
    pub at: Instant,
}

/// How much is gathered. Units whose shards are all there is do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Units that are gathered, or about to be, now.
    pub gathered: usize,
    /// The most that ever were.
    pub peak: usize,
    /// How many gathers were started.
    pub gathers: u64,
    /// How many reductions were started.
    pub reductions: u64,
}

/// The last events, and the counts of all.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) events: VecDeque<Event>,
    pub(crate) stats: Stats,
}

impl Log {
    pub(crate) fn note(&mut self, unit: usize, what: What) {
        let stats = &mut self.stats;
        match what {
            What::GatherStarted => {
                stats.gathers += 1;
                stats.gathered += 1;
                stats.peak = stats.peak.max(stats.gathered);
            }
            What::Released => stats.gathered = stats.gathered.saturating_sub(1),
            What::ReduceStarted => stats.reductions += 1,
            _ => {}
        }
        if self.events.len() == CAPACITY {
            self.events.pop_front();
        }
        self.events.push_back(Event { unit, what, at: Instant::now() });
    }
}
