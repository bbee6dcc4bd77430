//! One step of one rank: the schedule's operations, one after the other.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use ferrotitan_comm::Group;
use ferrotitan_nn::{Batch, Model};
use ferrotitan_schedule::{Action, Kind, Lowered, Message, Op, Payload, Span, Step};
use tch::Tensor;

use crate::activations::Live;
use crate::error::Context as _;
use crate::mail::Mail;
use crate::{Activations, Deferral, Deferred, Error, Result, StageHooks, Statistics};

/// What a step works with.
pub(crate) struct Run<'a> {
    pub(crate) group: &'a Group,
    pub(crate) plan: &'a Lowered,
    pub(crate) stages: &'a mut BTreeMap<usize, Model>,
    pub(crate) hooks: &'a mut dyn StageHooks,
    pub(crate) deferral: &'a Deferral,
    pub(crate) activations: &'a Activations,
    /// For each stage of this rank, the others that share a parameter with it.
    pub(crate) sharing: &'a BTreeMap<usize, Vec<usize>>,
    pub(crate) microbatches: &'a [Batch],
    /// What the loss is multiplied by before it is differentiated; nothing where forwards alone are run.
    pub(crate) scale: Option<f64>,
}

/// What a step has made so far.
struct Progress<'a> {
    mail: Mail<'a>,
    /// Forwards whose backward has not come, by stage and microbatch.
    live: HashMap<(usize, usize), Live>,
    /// Input gradients whose weight gradients have not come.
    deferred: HashMap<(usize, usize), Deferred>,
    /// Stages whose gradients are complete.
    complete: HashSet<usize>,
    reduced: HashSet<usize>,
    loss: Tensor,
    started: Instant,
    statistics: Statistics,
}

impl Run<'_> {
    /// Runs the operations of this rank. Gives the sum of the losses, in fp64, zero where the last stage is another
    /// rank's.
    pub(crate) fn run(mut self) -> Result<(Tensor, Statistics)> {
        let (group, plan) = (self.group, self.plan);
        let loss = Tensor::f_zeros([], (tch::Kind::Double, group.device())).context("the loss of a step")?;
        let mut progress = Progress {
            mail: Mail::new(group, &plan.placement),
            live: HashMap::new(),
            deferred: HashMap::new(),
            complete: HashSet::new(),
            reduced: HashSet::new(),
            loss,
            started: Instant::now(),
            statistics: Statistics::default(),
        };
        for &op in &plan.ranks[group.rank()] {
            self.operate(op, &mut progress).map_err(|source| self.during(op, source))?;
        }
        progress.mail.finish()?;
        if self.scale.is_some() {
            // Of a list without reductions.
            for stage in self.stages.keys().filter(|stage| !progress.reduced.contains(stage)) {
                self.hooks.reduce(*stage).map_err(hook("reduce"))?;
            }
            self.hooks.finish().map_err(hook("finish"))?;
        }
        Ok((progress.loss, progress.statistics))
    }

    /// Says where an error happened, unless it says so itself.
    fn during(&self, op: Op, source: Error) -> Error {
        match source {
            Error::Operation { .. } => source,
            source => Error::Operation { op, rank: self.group.rank(), source: Box::new(source) },
        }
    }

    fn operate(&mut self, op: Op, progress: &mut Progress<'_>) -> Result<()> {
        match op {
            Op::Compute(step) => self.compute(step, progress),
            Op::Send(message) if self.moves(message) => progress.mail.send(message),
            Op::Receive(message) if self.moves(message) => {
                let batch = &self.microbatches[message.microbatch];
                progress.mail.receive(message, &self.activations.shape(batch), self.activations.kind())
            }
            Op::Send(_) | Op::Receive(_) => Ok(()),
            Op::Unshard(stage) => self.hooks.unshard(stage).map_err(hook("unshard")),
            Op::Reshard(stage) => self.hooks.reshard(stage).map_err(hook("reshard")),
            Op::ReduceGradient(stage) if self.scale.is_some() => self.reduce(stage, progress),
            Op::ReduceGradient(_) => Ok(()),
        }
    }

    /// Whether a message is sent at all: without backwards there are no gradients.
    fn moves(&self, message: Message) -> bool {
        self.scale.is_some() || message.payload == Payload::Activation
    }

    /// Reduces a stage, and others that have waited for it, unless it shares parameters with one that still computes.
    fn reduce(&mut self, stage: usize, progress: &mut Progress<'_>) -> Result<()> {
        progress.complete.insert(stage);
        let others = |stage| self.sharing.get(&stage).map_or(&[][..], Vec::as_slice);
        for stage in std::iter::once(stage).chain(others(stage).iter().copied()) {
            let is_complete = |stage: &usize| progress.complete.contains(stage);
            if is_complete(&stage) && others(stage).iter().all(is_complete) && progress.reduced.insert(stage) {
                self.hooks.reduce(stage).map_err(hook("reduce"))?;
            }
        }
        Ok(())
    }

    fn compute(&mut self, step: Step, progress: &mut Progress<'_>) -> Result<()> {
        let (mut start, trains) = (None, self.scale.is_some());
        for action in step.actions().filter(|action| trains || action.kind == Kind::Forward) {
            let done = self.inputs(action, progress).and_then(|inputs| {
                start.get_or_insert_with(|| progress.started.elapsed());
                self.act(action, inputs, progress)
            });
            done.map_err(|source| self.during(Op::Compute(action.into()), source))?;
        }
        if let Some(start) = start {
            let end = progress.started.elapsed().as_secs_f64();
            progress.statistics.spans.push(Span { step, start: start.as_secs_f64(), end });
        }
        Ok(())
    }

    /// Waits for what an action needs of another stage: nothing where there is none.
    fn inputs(&self, action: Action, progress: &mut Progress<'_>) -> Result<Option<Tensor>> {
        let Action { kind, stage, microbatch } = action;
        let (payload, source) = match kind {
            Kind::Forward => (Payload::Activation, stage.checked_sub(1)),
            Kind::Backward | Kind::InputGradient => {
                (Payload::Gradient, Some(stage + 1).filter(|&stage| stage < self.plan.placement.len()))
            }
            Kind::WeightGradient => return Ok(None),
        };
        source.map(|source| progress.mail.take(Message { payload, source, microbatch })).transpose()
    }

    fn act(&mut self, action: Action, inputs: Option<Tensor>, progress: &mut Progress<'_>) -> Result<()> {
        let key = (action.stage, action.microbatch);
        let absent = |what: &str| Error::Absent { what: format!("{what} for {action}") };
        match action.kind {
            Kind::Forward => return self.forward(action, inputs, progress),
            Kind::Backward => {
                let live = progress.live.remove(&key).ok_or_else(|| absent("the forward"))?;
                let gradient = live.backward(inputs, self.scale)?;
                self.send_back(action, gradient, progress)?;
            }
            Kind::InputGradient => {
                let live = progress.live.remove(&key).ok_or_else(|| absent("the forward"))?;
                let (gradient, deferred) = self.deferral.defer(|| live.backward(inputs, self.scale));
                progress.deferred.insert(key, deferred);
                self.send_back(action, gradient?, progress)?;
            }
            Kind::WeightGradient => {
                let deferred = progress.deferred.remove(&key).ok_or_else(|| absent("the input gradient"))?;
                deferred.run()?;
            }
        }
        Ok(())
    }

    fn forward(&mut self, action: Action, inputs: Option<Tensor>, progress: &mut Progress<'_>) -> Result<()> {
        let Action { stage, microbatch, .. } = action;
        let batch = &self.microbatches[microbatch];
        let is_last = stage + 1 == self.plan.placement.len();
        if is_last && batch.labels.is_none() {
            return Err(Error::NoLabels { microbatch });
        }
        let absent = || Error::Absent { what: format!("stage {stage}") };
        let model = self.stages.get_mut(&stage).ok_or_else(absent)?;
        let (output, live) = Live::forward(model, inputs.as_ref(), batch)?;
        if self.scale.is_some() {
            progress.live.insert((stage, microbatch), live);
            let statistics = &mut progress.statistics;
            statistics.peak_live = statistics.peak_live.max(progress.live.len());
            statistics.peak_held = statistics.peak_held.max(progress.live.len() + progress.deferred.len());
        }
        if is_last {
            let sum = output.f_to_kind(tch::Kind::Double).and_then(|loss| progress.loss.f_add(&loss));
            progress.loss = sum.context("the loss of a step")?;
            return Ok(());
        }
        self.check(stage, microbatch, &output)?;
        progress.mail.put(Message { payload: Payload::Activation, source: stage, microbatch }, output);
        Ok(())
    }

    /// Hands the gradient of a stage's input to the stage before.
    fn send_back(&self, action: Action, gradient: Option<Tensor>, progress: &mut Progress<'_>) -> Result<()> {
        let Action { stage, microbatch, .. } = action;
        let Some(gradient) = gradient.filter(|_| stage > 0) else { return Ok(()) };
        self.check(stage, microbatch, &gradient)?;
        progress.mail.put(Message { payload: Payload::Gradient, source: stage, microbatch }, gradient);
        Ok(())
    }

    /// Refuses what the receiver does not expect.
    fn check(&self, stage: usize, microbatch: usize, tensor: &Tensor) -> Result<()> {
        let (shape, kind) = (self.activations.shape(&self.microbatches[microbatch]), self.activations.kind());
        if (tensor.size(), tensor.kind()) == (shape.clone(), kind) {
            return Ok(());
        }
        let got = format!("{:?} {:?}", tensor.size(), tensor.kind());
        Err(Error::Activations { stage, microbatch, got, expected: format!("{shape:?} {kind:?}") })
    }
}

fn hook(hook: &'static str) -> impl FnOnce(ferrotitan_comm::BoxError) -> Error {
    move |source| Error::Hook { hook, source }
}
