//! What one rank's collectives were: a ring buffer of the last ones, and totals of all.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tch::Kind;

use crate::{Call, Collective, Error, Members, Op};

/// One collective of one rank.
#[derive(Clone, Debug)]
pub struct Event {
    /// The how-manieth of its group it was, from 0; of a message, the how-manieth from its sender to its receiver. Ranks of
    /// one group can be compared by it.
    pub sequence: u64,
    /// The group's name, which is that of its view of the mesh.
    pub group: Arc<str>,
    /// Which collective.
    pub op: Op,
    /// With its parameters.
    pub what: Collective,
    /// The other world rank of a send or receive.
    pub peer: Option<usize>,
    /// The shape of the tensor that this rank brought (for a receive: got).
    pub shape: Vec<i64>,
    /// Its element type.
    pub kind: Kind,
    /// The bytes that this rank sends, by the formulas of [`Call::bytes_sent`].
    pub bytes: u64,
    /// When this rank started it.
    pub issued: Instant,
    /// When this rank began to wait for it.
    pub waited: Option<Instant>,
    /// When this rank had its result. Absent while it is in flight, and for good if it failed or was dropped.
    pub finished: Option<Instant>,
    /// Whether it was let go without being waited for.
    pub dropped: bool,
    /// Why it gave no result, if it failed.
    pub failed: Option<Failure>,
}

/// Why a collective gave no result: the kind of its [`Error`], which the errors of whoever called it may not show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// [`Error::Timeout`].
    Timeout,
    /// [`Error::Mismatch`].
    Mismatch,
    /// [`Error::PeerFailed`].
    PeerFailed,
    /// Any other.
    Other,
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        match error {
            Error::Timeout { .. } => Failure::Timeout,
            Error::Mismatch { .. } => Failure::Mismatch,
            Error::PeerFailed { .. } => Failure::PeerFailed,
            _ => Failure::Other,
        }
    }
}

impl Event {
    /// The call in words that are the same on all ranks exactly if the ranks agree: [`Call::signature`].
    pub fn signature(&self) -> String {
        Call { what: self.what.clone(), shape: self.shape.clone(), kind: self.kind }.signature()
    }

    /// How long this rank stood still for it: from the beginning of the wait to the result.
    pub fn blocked(&self) -> Duration {
        match (self.waited, self.finished) {
            (Some(waited), Some(finished)) => finished.saturating_duration_since(waited),
            _ => Duration::ZERO,
        }
    }
}

/// Sums over all collectives of one group and operation since the recorder was made or reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Total {
    /// How many were started.
    pub count: u64,
    /// The bytes that this rank sent for them.
    pub bytes: u64,
    /// How long this rank stood still for them.
    pub blocked: Duration,
    /// How many of them were let go without being waited for.
    pub dropped: u64,
}

/// A place in a recorder's history, for [`Recorder::since`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Mark(u64);

/// One rank's history of collectives. Clones share it. Groups of size 1 communicate nothing and record nothing.
#[derive(Clone, Debug)]
pub struct Recorder(Arc<Mutex<History>>);

#[derive(Debug)]
struct History {
    events: VecDeque<Event>,
    capacity: usize,
    /// How many events there have been: the newest has number `count - 1`.
    count: u64,
    totals: BTreeMap<(Arc<str>, Op), Total>,
}

impl Default for Recorder {
    fn default() -> Self {
        Recorder::new(Recorder::CAPACITY)
    }
}

impl Recorder {
    /// How many events a recorder keeps unless told otherwise.
    pub const CAPACITY: usize = 20_000;

    /// A recorder that keeps the last `capacity` events, and totals of all.
    pub fn new(capacity: usize) -> Self {
        Recorder(Arc::new(Mutex::new(History { events: VecDeque::new(), capacity, count: 0, totals: BTreeMap::new() })))
    }

    /// The events that are still held, oldest first.
    pub fn events(&self) -> Vec<Event> {
        self.history().events.iter().cloned().collect()
    }

    /// The newest event that is still held.
    pub fn last(&self) -> Option<Event> {
        self.history().events.back().cloned()
    }

    /// Totals by group name and operation.
    pub fn totals(&self) -> BTreeMap<(Arc<str>, Op), Total> {
        self.history().totals.clone()
    }

    /// The total of one operation in the groups of one name; zero where there was none.
    pub fn total(&self, group: &str, op: Op) -> Total {
        self.history().totals.get(&(group.into(), op)).copied().unwrap_or_default()
    }

    /// Now, as a place in the history.
    pub fn mark(&self) -> Mark {
        Mark(self.history().count)
    }

    /// The events since `mark`, oldest first. Those that the ring buffer no longer holds are missing.
    pub fn since(&self, mark: Mark) -> Vec<Event> {
        let history = self.history();
        let oldest = history.count - history.events.len() as u64;
        let skip = mark.0.saturating_sub(oldest) as usize;
        history.events.iter().skip(skip).cloned().collect()
    }

    /// Forgets all events and totals. Marks stay valid.
    pub fn reset(&self) {
        let mut history = self.history();
        history.events.clear();
        history.totals.clear();
    }

    /// Notes that a call has been started.
    pub(crate) fn issue(&self, members: &Members, sequence: u64, call: &Call) -> Ticket {
        let event = Event {
            sequence,
            group: members.name().clone(),
            op: call.op(),
            what: call.what.clone(),
            peer: call.peer().map(|peer| members.ranks()[peer]),
            shape: call.shape.clone(),
            kind: call.kind,
            bytes: call.bytes_sent(members.index(), members.size()),
            issued: Instant::now(),
            waited: None,
            finished: None,
            dropped: false,
            failed: None,
        };
        let mut history = self.history();
        let total = history.totals.entry((event.group.clone(), event.op)).or_default();
        total.count += 1;
        total.bytes += event.bytes;
        let number = history.count;
        history.count += 1;
        if history.capacity > 0 {
            if history.events.len() == history.capacity {
                history.events.pop_front();
            }
            history.events.push_back(event);
        }
        Ticket { recorder: self.clone(), number, group: members.name().clone(), op: call.op(), waited: None }
    }

    fn history(&self) -> MutexGuard<'_, History> {
        // The history is consistent between statements, so a panic elsewhere while it was locked does no harm.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One event's way through the recorder.
#[derive(Debug)]
pub(crate) struct Ticket {
    recorder: Recorder,
    number: u64,
    group: Arc<str>,
    op: Op,
    waited: Option<Instant>,
}

impl Ticket {
    /// `all-gather in group tp`.
    pub(crate) fn what(&self) -> String {
        format!("{} in group {}", self.op, self.group)
    }

    /// The rank begins to wait.
    pub(crate) fn wait(&mut self) {
        let now = Instant::now();
        self.waited = Some(now);
        self.update(|event| event.waited = Some(now), |_| {});
    }

    /// The rank has its result.
    pub(crate) fn finish(self) {
        let now = Instant::now();
        let blocked = self.waited.map_or(Duration::ZERO, |waited| now.saturating_duration_since(waited));
        self.update(|event| event.finished = Some(now), |total| total.blocked += blocked);
    }

    /// There will be no result.
    pub(crate) fn fail(self, error: &Error) {
        self.update(|event| event.failed = Some(error.into()), |_| {});
    }

    /// Nobody waited.
    pub(crate) fn drop_unwaited(self) {
        self.update(|event| event.dropped = true, |total| total.dropped += 1);
    }

    /// Changes the event and the total, as far as the ring buffer and a reset have left them.
    fn update(&self, event: impl FnOnce(&mut Event), total: impl FnOnce(&mut Total)) {
        let mut history = self.recorder.history();
        let age = history.count - self.number;
        if let Some(place) = (history.events.len() as u64).checked_sub(age) {
            history.events.get_mut(place as usize).map(event);
        }
        history.totals.get_mut(&(self.group.clone(), self.op)).map(total);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::ReduceOp;

    fn issue(recorder: &Recorder, sequence: u64) -> Ticket {
        let members = Members::new("tp", &[2, 5], 1).unwrap();
        let what = Collective::AllReduce { reduce: ReduceOp::Sum };
        recorder.issue(&members, sequence, &Call { what, shape: vec![6], kind: Kind::Double })
    }

    #[test]
    fn keeps_the_last_events_and_the_totals_of_all() {
        let recorder = Recorder::new(3);
        let mut mark = recorder.mark();
        let mut first = None;
        for sequence in 0..5 {
            if sequence == 3 {
                mark = recorder.mark();
            }
            let mut ticket = issue(&recorder, sequence);
            if sequence == 0 {
                first = Some(ticket);
                continue;
            }
            ticket.wait();
            ticket.finish();
        }
        let sequences = |events: Vec<Event>| events.iter().map(|event| event.sequence).collect::<Vec<_>>();
        assert_eq!(sequences(recorder.events()), [2, 3, 4]);
        assert_eq!(sequences(recorder.since(mark)), [3, 4]);
        assert!(recorder.events().iter().all(|event| event.finished.is_some() && event.bytes == 48));
        // The first one's event is gone, its total is not.
        first.unwrap().drop_unwaited();
        let total = recorder.total("tp", Op::AllReduce);
        assert_eq!((total.count, total.bytes, total.dropped), (5, 5 * 48, 1));
        assert_eq!(recorder.total("dp", Op::AllReduce), Total::default());
    }

    #[test]
    fn a_reset_forgets_but_does_not_confuse() {
        let recorder = Recorder::default();
        let early = issue(&recorder, 0);
        recorder.reset();
        let mark = recorder.mark();
        let late = issue(&recorder, 1);
        early.finish();
        assert_eq!(recorder.events()[0].finished, None);
        late.finish();
        assert!(recorder.events()[0].finished.is_some());
        assert_eq!(recorder.since(mark).len(), 1);
        assert_eq!(recorder.total("tp", Op::AllReduce).count, 1);
    }
}
