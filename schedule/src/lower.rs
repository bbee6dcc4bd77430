//! From what to compute to what to run: where ranks send, receive, gather parameters and reduce gradients.
//!
//! Each message is put at one moment of a simulated run, the end of the action that gives it. Both ranks' lists have
//! it at that moment, so any two ranks post their transfers in the same order, and no rank posts one that the other
//! reaches only after something that waits for this rank: the earliest operation of the run that is not done can
//! always be done. [`Lowered::check`] proves it again, without the clock.

use std::collections::HashMap;

use crate::action::{Kind, Schedule, Step};
use crate::costs::Costs;
use crate::error::Unsound;
use crate::lowered::{Lowered, Message, Op, Payload, messages_for};
use crate::simulate::simulate;
use crate::timeline::Span;

/// What lowering puts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoweringOptions {
    /// Gather a stage's parameters before its first use, and free them after its last: once a step, whatever the number
    /// of microbatches.
    pub unshard: bool,
    /// How many steps before a stage's first use its parameters start to be gathered.
    pub unshard_ahead: usize,
    /// How many steps earlier than a message can be there its receive is posted, as far as the order of the two
    /// ranks' transfers allows. With 0, a message that comes while its receiver computes waits for the end of that
    /// computation.
    pub receive_ahead: usize,
}

impl Default for LoweringOptions {
    /// No unshards; receives one step ahead.
    fn default() -> Self {
        Self { unshard: false, unshard_ahead: 1, receive_ahead: 1 }
    }
}

/// Puts communication into a sound schedule: sends directly after what they send, receives ahead of need, one gradient
/// reduction for each stage after its last gradient, and unshards if asked for. Stages that share a rank exchange no
/// messages.
///
/// # Errors
/// [`Unsound`] if the schedule is.
pub fn lower(schedule: &Schedule, options: &LoweringOptions) -> Result<Lowered, Unsound> {
    // The usual proportions. Other ones only move receives, by a step or so.
    let timeline = simulate(schedule, &Costs::default())?;
    let mut posts = posts(schedule, timeline.ranks());
    let ranks = timeline.ranks().iter().zip(&mut posts).map(|(spans, posts)| {
        let mut ops = merge(spans, posts);
        receive_earlier(&mut ops, options.receive_ahead, &schedule.placement);
        parameters(ops, options)
    });
    let lowered = Lowered {
        ranks: ranks.collect(),
        name: schedule.name.clone(),
        placement: schedule.placement.clone(),
        microbatches: schedule.microbatches,
    };
    lowered.check()?;
    Ok(lowered)
}

/// A transfer at a moment of the simulated run.
struct Post {
    time: f64,
    op: Op,
}

/// Each rank's transfers, all in one order.
fn posts(schedule: &Schedule, ranks: &[Vec<Span>]) -> Vec<Vec<Post>> {
    let mut wanted: HashMap<Message, usize> = HashMap::new();
    for (rank, steps) in schedule.ranks.iter().enumerate() {
        for &step in steps {
            wanted.extend(messages_for(step, &schedule.placement).map(|message| (message, rank)));
        }
    }
    let mut spans: Vec<(usize, &Span)> =
        ranks.iter().enumerate().flat_map(|(rank, spans)| spans.iter().map(move |span| (rank, span))).collect();
    // The sort is stable: at equal times, lower ranks first, and each rank's own order.
    spans.sort_by(|a, b| a.1.end.total_cmp(&b.1.end));
    let mut posts: Vec<Vec<Post>> = ranks.iter().map(|_| Vec::new()).collect();
    for (rank, span) in spans {
        for message in messages_from(span.step) {
            if let Some(&receiver) = wanted.get(&message) {
                posts[rank].push(Post { time: span.end, op: Op::Send(message) });
                posts[receiver].push(Post { time: span.end, op: Op::Receive(message) });
            }
        }
    }
    posts
}

/// What a step gives to other stages.
fn messages_from(step: Step) -> impl Iterator<Item = Message> {
    step.actions().filter_map(|action| {
        let payload = match action.kind {
            Kind::Forward => Payload::Activation,
            Kind::Backward | Kind::InputGradient => Payload::Gradient,
            Kind::WeightGradient => return None,
        };
        Some(Message { payload, source: action.stage, microbatch: action.microbatch })
    })
}

/// Puts transfers between the steps: after those that have started by then.
fn merge(spans: &[Span], posts: &[Post]) -> Vec<Op> {
    let mut ops = Vec::with_capacity(spans.len() + posts.len());
    let mut posts = posts.iter().peekable();
    for span in spans {
        while let Some(post) = posts.next_if(|post| post.time <= span.start) {
            ops.push(post.op);
        }
        ops.push(Op::Compute(span.step));
    }
    ops.extend(posts.map(|post| post.op));
    ops
}

/// Moves receives before up to `steps` computations, but never before another transfer with the same rank.
fn receive_earlier(ops: &mut [Op], steps: usize, placement: &[usize]) {
    for at in 0..ops.len() {
        let Op::Receive(message) = ops[at] else { continue };
        let sender = placement[message.source];
        let mut to = at;
        let mut passed = 0;
        for before in (0..at).rev() {
            let peer = match ops[before] {
                Op::Send(message) => Some(placement[message.target()]),
                Op::Receive(message) => Some(placement[message.source]),
                Op::Compute(_) | Op::Unshard(_) | Op::Reshard(_) | Op::ReduceGradient(_) => None,
            };
            match peer {
                Some(peer) if peer == sender => break,
                Some(_) => {}
                None if passed == steps => break,
                None => {
                    passed += 1;
                    to = before;
                }
            }
        }
        ops[to..=at].rotate_right(1);
    }
}

/// Puts in what concerns parameters: unshards, reshards, and gradient reductions.
fn parameters(ops: Vec<Op>, options: &LoweringOptions) -> Vec<Op> {
    // Stages at their first and last use, by the number of computations before it.
    let mut first: Vec<(usize, usize)> = Vec::new();
    let mut last: HashMap<usize, usize> = HashMap::new();
    let mut computations = 0;
    for op in &ops {
        let Op::Compute(step) = op else { continue };
        for action in step.actions() {
            if last.insert(action.stage, computations).is_none() {
                first.push((computations.saturating_sub(options.unshard_ahead), action.stage));
            }
        }
        computations += 1;
    }

    let mut all = Vec::with_capacity(ops.len() + 3 * first.len());
    let mut unshards = first.into_iter().peekable();
    let mut finished: Vec<usize> = Vec::new();
    let mut computations = 0;
    let finish = |all: &mut Vec<Op>, finished: &mut Vec<usize>| {
        for stage in finished.drain(..) {
            all.push(Op::ReduceGradient(stage));
            all.extend(options.unshard.then_some(Op::Reshard(stage)));
        }
    };
    for op in ops {
        // The next stage waits for what is sent; nobody waits for the reduction.
        if !matches!(op, Op::Send(_)) {
            finish(&mut all, &mut finished);
        }
        if let Op::Compute(step) = op {
            while let Some((_, stage)) = unshards.next_if(|&(at, _)| at <= computations) {
                all.extend(options.unshard.then_some(Op::Unshard(stage)));
            }
            finished.extend(step.actions().map(|action| action.stage).filter(|stage| last[stage] == computations));
            computations += 1;
        }
        all.push(op);
    }
    finish(&mut all, &mut finished);
    all
}
