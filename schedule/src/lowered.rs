//! Schedules with communication in place, and the proof that it works out.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;

use crate::action::{Action, Kind, Schedule, Step};
use crate::costs::Costs;
use crate::error::Unsound;
use crate::simulate::{Need, needs, simulate};

/// What a message carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// The outputs of a stage, to the next stage.
    Activation,
    /// The gradients of a stage's inputs, to the stage before.
    Gradient,
}

/// What one stage hands to a neighbouring one that another rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// What it carries.
    pub payload: Payload,
    /// The stage that gives it: of a gradient, not 0.
    pub source: usize,
    /// The microbatch.
    pub microbatch: usize,
}

impl Message {
    /// The stage that takes it.
    pub fn target(self) -> usize {
        match self.payload {
            Payload::Activation => self.source.saturating_add(1),
            Payload::Gradient => self.source.saturating_sub(1),
        }
    }

    fn letter(self) -> char {
        match self.payload {
            Payload::Activation => 'F',
            Payload::Gradient => 'B',
        }
    }
}

/// One entry of a rank's lowered list. Only computation waits: for the messages that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Wait for the inputs, and compute. `0F3`, `(0F3;3B1)OVERLAP_F_B`.
    Compute(Step),
    /// Start to send. `0SEND_F3`: stage 0 sends its outputs of microbatch 3.
    Send(Message),
    /// Start to receive. `1RECV_F3`: stage 1 receives its inputs of microbatch 3.
    Receive(Message),
    /// Start to gather a stage's parameters. `0UNSHARD`.
    Unshard(usize),
    /// Free a stage's gathered parameters. `0RESHARD`.
    Reshard(usize),
    /// Start to reduce a stage's gradients over its replicas and shards: all its microbatches are in. `0REDUCE_GRAD`.
    ReduceGradient(usize),
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Compute(step) => step.fmt(f),
            Op::Send(message) => write!(f, "{}SEND_{}{}", message.source, message.letter(), message.microbatch),
            Op::Receive(message) => write!(f, "{}RECV_{}{}", message.target(), message.letter(), message.microbatch),
            Op::Unshard(stage) => write!(f, "{stage}UNSHARD"),
            Op::Reshard(stage) => write!(f, "{stage}RESHARD"),
            Op::ReduceGradient(stage) => write!(f, "{stage}REDUCE_GRAD"),
        }
    }
}

/// A schedule with communication in place: what an executor runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lowered {
    /// What to call it.
    pub name: String,
    /// Each rank's operations, in order.
    pub ranks: Vec<Vec<Op>>,
    /// The rank that holds each stage, and so the sender and the receiver of each message.
    pub placement: Vec<usize>,
    /// How many microbatches the batch is cut into.
    pub microbatches: usize,
}

impl Lowered {
    /// The computation alone.
    pub fn schedule(&self) -> Schedule {
        let computed = |op: &Op| match op {
            Op::Compute(step) => Some(*step),
            _ => None,
        };
        Schedule {
            name: self.name.clone(),
            ranks: self.ranks.iter().map(|ops| ops.iter().filter_map(computed).collect()).collect(),
            placement: self.placement.clone(),
            microbatches: self.microbatches,
        }
    }

    /// Proves that the lists can run: the computation is sound, every message that it needs is sent once and received
    /// once, after it was computed and before it is needed, and nobody waits for ever.
    ///
    /// Between two ranks, transfers are taken to go one after the other in the order in which both ranks post them, in
    /// both directions together, and to take place when both have posted them. That is the least that transports offer
    /// (NCCL has one queue for two ranks, without tags), and implies that each direction is in order.
    ///
    /// Where there are unshards, a stage must be unsharded when it computes, and resharded in the end; where there are
    /// gradient reductions, each stage's comes once, after its last gradient.
    ///
    /// # Errors
    /// The first operation that cannot run, and why.
    pub fn check(&self) -> Result<(), Unsound> {
        simulate(&self.schedule(), &Costs::default())?;
        self.check_shards()?;
        let mut replay = Replay::new(self);
        while let Some(rank) = replay.ready.pop_front() {
            while let Some(&op) = self.ranks[rank].get(replay.positions[rank]) {
                if !replay.advance(rank, op)? {
                    break;
                }
                replay.positions[rank] += 1;
            }
        }
        replay.stalled().map_or(Ok(()), Err)
    }

    fn check_shards(&self) -> Result<(), Unsound> {
        let unshards: HashSet<usize> =
            self.ops().filter_map(|op| if let Op::Unshard(at) = op { Some(at) } else { None }).collect();
        let reduces = self.ops().any(|op| matches!(op, Op::ReduceGradient(_)));
        for (rank, ops) in self.ranks.iter().enumerate() {
            let mut whole: HashSet<usize> = HashSet::new();
            let mut reduced: HashSet<usize> = HashSet::new();
            for (position, &op) in ops.iter().enumerate() {
                let refuse = |reason: String| Err(Unsound::Lowered { op, rank, position, reason });
                match op {
                    Op::Unshard(stage) | Op::Reshard(stage) | Op::ReduceGradient(stage)
                        if self.placement.get(stage) != Some(&rank) =>
                    {
                        return refuse("its stage is not on this rank".into());
                    }
                    Op::Unshard(stage) if !whole.insert(stage) => {
                        return refuse("the stage is unsharded already".into());
                    }
                    Op::Reshard(stage) if !whole.remove(&stage) => return refuse("the stage is not unsharded".into()),
                    Op::ReduceGradient(stage) if !reduced.insert(stage) => {
                        return refuse("the stage's gradients have been reduced already".into());
                    }
                    Op::Compute(step) => {
                        for action in step.actions() {
                            if unshards.contains(&action.stage) && !whole.contains(&action.stage) {
                                return refuse(format!("unshard stage {} before it", action.stage));
                            }
                            if action.kind != Kind::Forward && reduced.contains(&action.stage) {
                                return refuse(format!(
                                    "the gradients of stage {} were reduced before it",
                                    action.stage
                                ));
                            }
                        }
                    }
                    _ => {}
                }
            }
            let last = ops.len().saturating_sub(1);
            let refuse = |op, reason: &str| Err(Unsound::Lowered { op, rank, position: last, reason: reason.into() });
            if let Some(&stage) = whole.iter().min() {
                return refuse(Op::Reshard(stage), "it is missing at the end of the list");
            }
            let unreduced = (0..self.placement.len()).find(|at| self.placement[*at] == rank && !reduced.contains(at));
            if let Some(stage) = unreduced.filter(|_| reduces) {
                return refuse(Op::ReduceGradient(stage), "it is missing from the list");
            }
        }
        Ok(())
    }

    fn ops(&self) -> impl Iterator<Item = Op> + '_ {
        self.ranks.iter().flatten().copied()
    }
}

/// What a computation needs from another rank.
pub(crate) fn messages_for(step: Step, placement: &[usize]) -> impl Iterator<Item = Message> {
    step.actions().flat_map(move |action| {
        needs(action, placement.len()).filter_map(move |need| {
            let message = match need {
                Need::Forward { stage, microbatch } => {
                    Message { payload: Payload::Activation, source: stage, microbatch }
                }
                Need::Gradient { stage, microbatch } => {
                    Message { payload: Payload::Gradient, source: stage, microbatch }
                }
            };
            (placement[message.source] != placement[action.stage]).then_some(message)
        })
    })
}

/// The ranks' lists on their way.
struct Replay<'a> {
    lowered: &'a Lowered,
    positions: Vec<usize>,
    ready: VecDeque<usize>,
    computed: HashSet<Action>,
    /// Messages that the ranks have posted and that have not moved, by (poster, other rank).
    posted: HashMap<(usize, usize), VecDeque<Message>>,
    arrived: HashSet<Message>,
    /// Messages sent, and messages received.
    seen: [HashSet<Message>; 2],
}

impl<'a> Replay<'a> {
    fn new(lowered: &'a Lowered) -> Self {
        Self {
            lowered,
            positions: vec![0; lowered.ranks.len()],
            ready: (0..lowered.ranks.len()).collect(),
            computed: HashSet::new(),
            posted: HashMap::new(),
            arrived: HashSet::new(),
            seen: [HashSet::new(), HashSet::new()],
        }
    }

    fn refuse(&self, rank: usize, op: Op, reason: impl Into<String>) -> Unsound {
        Unsound::Lowered { op, rank, position: self.positions[rank], reason: reason.into() }
    }

    /// Runs a rank's next operation; false if it has to wait.
    fn advance(&mut self, rank: usize, op: Op) -> Result<bool, Unsound> {
        match op {
            Op::Compute(step) => {
                if !messages_for(step, &self.lowered.placement).all(|message| self.arrived.contains(&message)) {
                    return Ok(false);
                }
                self.computed.extend(step.actions());
            }
            Op::Send(message) => self.post(rank, op, message, true)?,
            Op::Receive(message) => self.post(rank, op, message, false)?,
            Op::Unshard(_) | Op::Reshard(_) | Op::ReduceGradient(_) => {}
        }
        Ok(true)
    }

    fn post(&mut self, rank: usize, op: Op, message: Message, sends: bool) -> Result<(), Unsound> {
        let Message { payload, source, microbatch } = message;
        let placement = &self.lowered.placement;
        let target = match payload {
            Payload::Activation => source.checked_add(1),
            Payload::Gradient => source.checked_sub(1),
        };
        let rank_of = |stage: usize| placement.get(stage).copied();
        let (Some(from), Some(to)) = (rank_of(source), target.and_then(rank_of)) else {
            return Err(self.refuse(rank, op, "there is no such stage"));
        };
        if microbatch >= self.lowered.microbatches {
            return Err(self.refuse(rank, op, "there is no such microbatch"));
        }
        if from == to {
            return Err(self.refuse(rank, op, "both stages are on one rank, which hands the tensor over itself"));
        }
        let (home, other) = if sends { (from, to) } else { (to, from) };
        if rank != home {
            return Err(self.refuse(rank, op, format!("its stage is on rank {home}")));
        }
        if !self.seen[usize::from(sends)].insert(message) {
            return Err(self.refuse(rank, op, "it has been posted before"));
        }
        let kinds: &[Kind] = match payload {
            Payload::Activation => &[Kind::Forward],
            Payload::Gradient => &[Kind::Backward, Kind::InputGradient],
        };
        if sends && !kinds.iter().any(|&kind| self.computed.contains(&Action::new(kind, source, microbatch))) {
            return Err(self.refuse(rank, op, "what it sends is not computed before it"));
        }
        self.posted.entry((rank, other)).or_default().push_back(message);
        self.transfer(rank, other, op)
    }

    /// Moves what both ranks have posted.
    fn transfer(&mut self, rank: usize, other: usize, op: Op) -> Result<(), Unsound> {
        let head =
            |posted: &HashMap<_, VecDeque<Message>>, key| posted.get(&key).and_then(|queue| queue.front()).copied();
        while let (Some(mine), Some(theirs)) = (head(&self.posted, (rank, other)), head(&self.posted, (other, rank))) {
            if mine != theirs {
                let theirs = match self.lowered.placement[theirs.source] == other {
                    true => Op::Send(theirs),
                    false => Op::Receive(theirs),
                };
                let reason =
                    format!("rank {other} posts {theirs} in its place; the transfers of two ranks keep their order");
                return Err(self.refuse(rank, op, reason));
            }
            for key in [(rank, other), (other, rank)] {
                self.posted.get_mut(&key).and_then(VecDeque::pop_front);
            }
            self.arrived.insert(mine);
            self.ready.push_back(self.lowered.placement[mine.target()]);
        }
        Ok(())
    }

    /// Of the computations that nothing will let run, one for which an operation is missing, or else the first.
    fn stalled(&self) -> Option<Unsound> {
        let mut first = None;
        for (rank, ops) in self.lowered.ranks.iter().enumerate() {
            let Some(&op) = ops.get(self.positions[rank]) else { continue };
            let Op::Compute(step) = op else { continue };
            let missing = messages_for(step, &self.lowered.placement).find(|message| !self.arrived.contains(message));
            let Some(message) = missing else { continue };
            let sender = self.lowered.placement[message.source];
            let (send, receive) = (Op::Send(message), Op::Receive(message));
            if !self.seen[0].contains(&message) {
                return Some(self.refuse(rank, op, format!("{receive} does not come before it")));
            }
            if !self.lowered.ranks[sender].contains(&send) {
                return Some(self.refuse(rank, op, format!("{send} is missing from rank {sender}")));
            }
            first = first.or_else(|| {
                Some(self.refuse(rank, op, format!("{send} of rank {sender} comes after what waits for this rank")))
            });
        }
        first
    }
}
