//! Where the rank threads of one group meet.
//!
//! A collective is a meeting. Each rank puts its tensors on the table when it enters, and goes on with its own work.
//! Once all have entered, the meeting is a list of tasks, and whoever waits for its result performs those that nobody
//! has claimed: its own first, then those of ranks that are late to wait. So a wait depends on other ranks having
//! entered, never on their waiting too; and when it ends, all tasks are done, so that every input is free again.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tch::Tensor;

use super::meeting::Meeting;
use super::memory::{self, Part};
use crate::call::{Call, Collective};
use crate::group::duplicate;
use crate::{Buffers, Error, Members, Op, Result, Transport, Work};

/// A collective whose tensors are smaller than this together is done by the last one to enter, before it wakes the
/// others: they would take longer to wake than to help.
const SMALL: u64 = 1 << 18;

#[derive(Debug)]
pub(super) struct Room {
    timeout: Duration,
    state: Mutex<State>,
    /// Something that somebody may be waiting for has happened.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    meetings: HashMap<u64, Meeting>,
    mail: Mail,
    /// Why nothing can be waited for any more.
    broken: Option<Broken>,
    /// World ranks that have returned, and so will enter nothing any more.
    departed: Vec<usize>,
}

/// Messages between pairs of ranks, by sender, receiver, and number within the pair.
#[derive(Debug, Default)]
struct Mail {
    letters: HashMap<(usize, usize, u64), (Call, Tensor)>,
    expected: HashMap<(usize, usize, u64), Call>,
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// That of the meeting of this number.
    Result(u64),
    /// The letter of this key.
    Letter((usize, usize, u64)),
}

#[derive(Clone, Debug)]
enum Broken {
    Failed { rank: usize, reason: String },
    Mismatch { group: String, sequence: u64, rank: usize, called: String, other: usize, other_called: String },
}

impl Broken {
    fn error(&self) -> Error {
        match self.clone() {
            Broken::Failed { rank, reason } => Error::PeerFailed { rank: Some(rank), reason },
            Broken::Mismatch { group, sequence, rank, called, other, other_called } => {
                Error::Mismatch { group, sequence, rank, called, other, other_called }
            }
        }
    }
}

impl Room {
    pub(super) fn new(timeout: Duration) -> Self {
        Room { timeout, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Ends all waiting: `rank` has failed.
    pub(super) fn fail(&self, rank: usize, reason: &str) {
        let mut state = self.lock();
        state.broken.get_or_insert_with(|| Broken::Failed { rank, reason: reason.to_owned() });
        self.changed.notify_all();
    }

    /// Ends the waiting for what `rank` has not entered.
    pub(super) fn depart(&self, rank: usize) {
        self.lock().departed.push(rank);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that panics runs while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, members: &Members, sequence: u64, call: Call, buffers: Buffers) -> Result<()> {
        let (op, index, size) = (call.op(), members.index(), members.size());
        let small = call.tensor_bytes() * size as u64 <= SMALL;
        let part = Part::new(call, buffers).map_err(|error| members.backend(op, error))?;
        let mut state = self.lock();
        state.intact()?;
        let meeting = state.meetings.entry(sequence).or_insert_with(|| Meeting::new(&part.call, size));
        if let Some((other, theirs)) = meeting.conflict(index, &part.call) {
            let broken = mismatch(members, sequence, (index, &part.call), (other, &theirs));
            let error = broken.error();
            state.broken = Some(broken);
            self.changed.notify_all();
            return Err(error);
        }
        meeting.enter(index, part);
        if meeting.is_complete() {
            if small {
                state = self.help(state, sequence, index);
            }
            drop(state);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Performs tasks of a complete meeting until none is left to claim.
    fn help<'a>(&'a self, mut state: MutexGuard<'a, State>, sequence: u64, own: usize) -> MutexGuard<'a, State> {
        while let Some((task, parts)) = state.meetings.get_mut(&sequence).and_then(|meeting| meeting.claim(own)) {
            drop(state);
            let made = memory::perform(&parts, task);
            drop(parts);
            state = self.lock();
            if let Some(meeting) = state.meetings.get_mut(&sequence) {
                meeting.complete(task, made.map_err(|error| error.to_string()));
                if meeting.is_over() {
                    self.changed.notify_all();
                }
            }
        }
        state
    }

    /// Waits for what is wanted, doing what can be done for it.
    fn wait(&self, members: &Members, op: Op, wanted: Wanted) -> Result<Tensor> {
        let begun = Instant::now();
        let mut state = self.lock();
        loop {
            if let Wanted::Result(sequence) = wanted {
                state = self.help(state, sequence, members.index());
            }
            if let Some(found) = state.take(wanted, members.index()) {
                return found.map_err(|refused| members.backend(op, refused));
            }
            state.intact()?;
            let waiting_for: Vec<_> = state.missing(wanted).into_iter().map(|index| members.ranks()[index]).collect();
            if let Some(&rank) = waiting_for.iter().find(|rank| state.departed.contains(rank)) {
                let reason = format!("it has returned, but rank {} waits for its part in {op}", members.rank());
                return Err(Error::PeerFailed { rank: Some(rank), reason });
            }
            let Some(rest) = self.timeout.checked_sub(begun.elapsed()).filter(|rest| !rest.is_zero()) else {
                let (group, rank) = (members.name().to_string(), members.rank());
                return Err(Error::Timeout { op, group, rank, waiting_for, after: self.timeout });
            };
            state = self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(&self, members: &Members, number: u64, to: usize, call: Call, tensor: Tensor) -> Result<()> {
        let mut state = self.lock();
        state.intact()?;
        let key = (members.index(), to, number);
        if let Some(expected) = state.mail.expected.get(&key).cloned() {
            self.compare(&mut state, members, number, &call, (to, &expected))?;
        }
        state.mail.letters.insert(key, (call, tensor));
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    fn expect(&self, members: &Members, number: u64, from: usize, call: Call) -> Result<()> {
        let mut state = self.lock();
        state.intact()?;
        let key = (from, members.index(), number);
        if let Some(sent) = state.mail.letters.get(&key).map(|(sent, _)| sent.clone()) {
            self.compare(&mut state, members, number, &call, (from, &sent))?;
        }
        state.mail.expected.insert(key, call);
        Ok(())
    }

    /// Breaks the room when the two ends of a message differ in shape or kind.
    fn compare(
        &self,
        state: &mut State,
        members: &Members,
        number: u64,
        own: &Call,
        (other, theirs): (usize, &Call),
    ) -> Result<()> {
        if (&own.shape, own.kind) == (&theirs.shape, theirs.kind) {
            return Ok(());
        }
        let broken = mismatch(members, number, (members.index(), own), (other, theirs));
        let error = broken.error();
        state.broken = Some(broken);
        self.changed.notify_all();
        Err(error)
    }
}

fn mismatch(members: &Members, sequence: u64, own: (usize, &Call), other: (usize, &Call)) -> Broken {
    Broken::Mismatch {
        group: members.name().to_string(),
        sequence,
        rank: members.ranks()[own.0],
        called: own.1.to_string(),
        other: members.ranks()[other.0],
        other_called: other.1.to_string(),
    }
}

impl State {
    fn intact(&self) -> Result<()> {
        self.broken.as_ref().map_or(Ok(()), |broken| Err(broken.error()))
    }

    /// What the rank at `index` wants, if it is there.
    fn take(&mut self, wanted: Wanted, index: usize) -> Option<Result<Tensor, String>> {
        match wanted {
            Wanted::Letter(key) => self.mail.letters.remove(&key).map(|(_, tensor)| Ok(tensor)),
            Wanted::Result(sequence) => self.meetings.get_mut(&sequence)?.take(index),
        }
    }

    /// The group ranks that have not done their part.
    fn missing(&self, wanted: Wanted) -> Vec<usize> {
        match wanted {
            Wanted::Letter((from, ..)) => vec![from],
            Wanted::Result(sequence) => self.meetings.get(&sequence).map_or_else(Vec::new, Meeting::missing),
        }
    }

    /// One rank has its result, or wants none.
    fn leave(&mut self, sequence: u64) {
        if self.meetings.get_mut(&sequence).is_some_and(Meeting::leave) {
            self.meetings.remove(&sequence);
        }
    }
}

/// One rank's seat in a room.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) room: Arc<Room>,
    pub(super) members: Members,
}

impl Transport for Seat {
    fn start(&self, sequence: u64, call: Call, buffers: Buffers) -> Result<Box<dyn Work>> {
        let (room, members, op) = (self.room.clone(), self.members.clone(), call.op());
        match call.what {
            Collective::Send { to } => {
                let refused = |error| members.backend(op, error);
                let input = buffers.input.ok_or_else(|| members.argument(op, "there is nothing to send"))?;
                let letter = if buffers.donated { input } else { duplicate(&input).map_err(refused)? };
                room.send(&members, sequence, to, call, letter)?;
                Ok(Box::new(Sent))
            }
            Collective::Recv { from } => {
                room.expect(&members, sequence, from, call)?;
                Ok(Box::new(Awaited { room, members, from, number: sequence }))
            }
            _ => {
                room.enter(&members, sequence, call, buffers)?;
                Ok(Box::new(Entered { room, members, op, sequence }))
            }
        }
    }
}

/// A message that has left: the letter is a copy, so nobody need wait.
struct Sent;

impl Work for Sent {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Tensor> {
        Ok(Tensor::new())
    }
}

struct Awaited {
    room: Arc<Room>,
    members: Members,
    from: usize,
    number: u64,
}

impl Work for Awaited {
    fn is_done(&self) -> bool {
        self.room.lock().mail.letters.contains_key(&(self.from, self.members.index(), self.number))
    }

    fn wait(self: Box<Self>) -> Result<Tensor> {
        let key = (self.from, self.members.index(), self.number);
        self.room.wait(&self.members, Op::Recv, Wanted::Letter(key))
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        let key = (self.from, self.members.index(), self.number);
        self.room.lock().mail.expected.remove(&key);
    }
}

struct Entered {
    room: Arc<Room>,
    members: Members,
    op: Op,
    sequence: u64,
}

impl Work for Entered {
    fn is_done(&self) -> bool {
        self.room.lock().meetings.get(&self.sequence).is_none_or(Meeting::is_complete)
    }

    fn wait(self: Box<Self>) -> Result<Tensor> {
        self.room.wait(&self.members, self.op, Wanted::Result(self.sequence))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.room.lock().leave(self.sequence);
    }
}
