//! What a rank does, in which order: actions, steps, schedules.

use std::fmt;

/// What an action computes. The letters are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `F`: the outputs of a stage.
    Forward,
    /// `B`: the gradients of a stage's inputs and of its weights, in one go.
    Backward,
    /// `I`: the gradients of a stage's inputs alone.
    InputGradient,
    /// `W`: the gradients of a stage's weights, which its `I` left for later.
    WeightGradient,
}

impl Kind {
    /// The letter of the CSV form.
    pub fn letter(self) -> char {
        match self {
            Kind::Forward => 'F',
            Kind::Backward => 'B',
            Kind::InputGradient => 'I',
            Kind::WeightGradient => 'W',
        }
    }

    /// Whether the action gives the gradient of its stage's inputs, which the stage before waits for.
    pub fn gives_input_gradient(self) -> bool {
        matches!(self, Kind::Backward | Kind::InputGradient)
    }

    /// Whether the action gives the gradient of its stage's weights.
    pub fn gives_weight_gradient(self) -> bool {
        matches!(self, Kind::Backward | Kind::WeightGradient)
    }
}

/// One computation of one stage on one microbatch. Its text is `<stage><letter><microbatch>`, as `2F0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// What is computed.
    pub kind: Kind,
    /// The stage, from 0 (the embedding) to the schedule's number of stages less one (the loss).
    pub stage: usize,
    /// The microbatch, from 0.
    pub microbatch: usize,
}

impl Action {
    /// An action.
    pub fn new(kind: Kind, stage: usize, microbatch: usize) -> Self {
        Self { kind, stage, microbatch }
    }

    /// The forward of a stage on a microbatch.
    pub fn forward(stage: usize, microbatch: usize) -> Self {
        Self::new(Kind::Forward, stage, microbatch)
    }

    /// The full backward of a stage on a microbatch.
    pub fn backward(stage: usize, microbatch: usize) -> Self {
        Self::new(Kind::Backward, stage, microbatch)
    }

    /// The input gradient of a stage on a microbatch.
    pub fn input_gradient(stage: usize, microbatch: usize) -> Self {
        Self::new(Kind::InputGradient, stage, microbatch)
    }

    /// The weight gradient of a stage on a microbatch.
    pub fn weight_gradient(stage: usize, microbatch: usize) -> Self {
        Self::new(Kind::WeightGradient, stage, microbatch)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.microbatch)
    }
}

/// One entry of a rank's list: an action, or two that the rank may run at once.
///
/// A pair is one unit to its neighbours: it starts when the inputs of both are there, and its outputs leave when both
/// are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// One action.
    One(Action),
    /// A forward and a backward of other data, which share nothing, so that the communication inside one may hide
    /// behind the computation of the other.
    Pair {
        /// The forward.
        forward: Action,
        /// The full backward or input gradient.
        backward: Action,
    },
}

impl Step {
    /// The step's actions, in order.
    pub fn actions(&self) -> impl Iterator<Item = Action> + use<> {
        let (first, second) = match *self {
            Step::One(action) => (action, None),
            Step::Pair { forward, backward } => (forward, Some(backward)),
        };
        std::iter::once(first).chain(second)
    }
}

impl From<Action> for Step {
    fn from(action: Action) -> Self {
        Step::One(action)
    }
}

impl fmt::Display for Step {
    /// PyTorch's text: `0F3`, or `(0F3;3B1)OVERLAP_F_B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::One(action) => action.fmt(f),
            Step::Pair { forward, backward } => write!(f, "({forward};{backward})OVERLAP_F_B"),
        }
    }
}

/// What every rank of a pipeline does in one training step, in which order.
///
/// It is plain data and may hold nonsense; [`verify`](crate::verify) tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What to call it in messages and pictures.
    pub name: String,
    /// Each rank's steps, in order.
    pub ranks: Vec<Vec<Step>>,
    /// The rank that holds each stage.
    pub placement: Vec<usize>,
    /// How many microbatches the batch is cut into.
    pub microbatches: usize,
}

impl Schedule {
    /// How many stages the model is cut into.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// The stages that a rank holds, in ascending order.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.stages()).filter(|&stage| self.placement[stage] == rank).collect()
    }

    /// All actions of a rank, in order; none of a rank that does not exist.
    pub fn actions(&self, rank: usize) -> impl Iterator<Item = Action> + '_ {
        self.ranks.get(rank).into_iter().flatten().flat_map(Step::actions)
    }
}
