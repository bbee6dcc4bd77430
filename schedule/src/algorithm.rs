//! The named schedules: their names, where they place stages, and who generates them.

use std::fmt;
use std::str::FromStr;

use crate::action::{Schedule, Step};
use crate::error::{Error, Result};
use crate::interleaved::Interleaving;
use crate::{breadth_first, list_scheduling, v_shape};

/// The most forwards of a generated schedule: far above any run, far below what fills a machine's memory.
const MAX_FORWARDS: usize = 1 << 22;

/// A way to order the work of a pipeline.
///
/// Bubbles below are in units of P ranks, V stages a rank, M microbatches, and F, I, W: the time that a rank's share of
/// the layers takes for a forward, an input gradient and a weight gradient. All hold without communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// All forwards, then all backwards. Bubble (P-1)(F+I+W)/V; holds the activations of all microbatches.
    ///
    /// Huang et al., "GPipe", 2019. With several stages a rank, it goes through them one after the other, like
    /// [`LoopedBfs`](Self::LoopedBfs).
    GPipe,
    /// A forward, a backward, and so on, as soon as backwards can start. Bubble (P-1)(F+I+W); rank r holds at most P-r
    /// microbatches.
    ///
    /// Narayanan et al., "PipeDream", 2019. With several stages a rank it is
    /// [`Interleaved1F1B`](Self::Interleaved1F1B).
    OneForwardOneBackward,
    /// 1F1B over V stages a rank, visited in rounds of at least P microbatches. Bubble (P-1)(F+I+W)/V when M >= P.
    ///
    /// Narayanan et al., "Efficient large-scale language model training", 2021. PyTorch needs M to be a multiple of the
    /// number of rounds; here some rounds are longer by one.
    Interleaved1F1B,
    /// All forwards, stage by stage, then all backwards, stage by stage and from the last microbatch to the first.
    /// Bubble (P-1)(F+I+W)/V; holds the activations of all microbatches.
    ///
    /// Lamy-Poirier, "Breadth-first pipeline parallelism", 2022.
    LoopedBfs,
    /// 1F1B with weight gradients put off into the bubbles. Bubble (P-1)(F+I-W), activations like 1F1B's.
    ///
    /// Qi et al., "Zero bubble pipeline parallelism", 2023, there called ZB-H1. With several stages a rank it is
    /// [`InterleavedZeroBubble`](Self::InterleavedZeroBubble).
    Zb1p,
    /// Interleaved 1F1B with weight gradients put off into the bubbles. Bubble (P-1)(F+I-W)/V when M >= P.
    InterleavedZeroBubble,
    /// Two stages a rank, on the way there and on the way back. No rank idles between its first and last action;
    /// makespan (P-1)F/2 above the ideal when F = I = W, and 2P stages' activations on each rank.
    ///
    /// Qi et al., "Pipeline parallelism with controllable memory", 2024.
    ZbvZeroBubble,
    /// Two stages a rank in a V, with pairs of a forward and a backward that overlap. At most 2P+1 stages' activations.
    ///
    /// DeepSeek-AI's DualPipe, 2024, cut in half by Qi et al. PyTorch needs M >= 2P; here fewer run too.
    DualPipeV,
    /// Interleaved 1F1B with any number of consecutive microbatches a visit, from depth first (N = P) to breadth first
    /// (N = M). The last round takes what remains. Bubble (P-1)(F+I+W)/V when N >= P and N divides M. Larger N hides
    /// more communication and holds more activations; N < P leaves ranks idle in every round.
    ///
    /// Grattafiori et al., "The Llama 3 herd of models", 2024, section 3.3.
    Flexible {
        /// N: how many consecutive microbatches a stage works on before its rank turns to its next stage.
        microbatches_per_round: usize,
    },
}

/// Where a schedule puts stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Stage s on rank s mod P.
    Loop,
    /// Down the ranks and back up: stages r and 2P-1-r on rank r.
    V,
}

impl Algorithm {
    /// The schedules that a name alone says all of.
    pub const ALL: [Algorithm; 8] = [
        Algorithm::GPipe,
        Algorithm::OneForwardOneBackward,
        Algorithm::Interleaved1F1B,
        Algorithm::LoopedBfs,
        Algorithm::Zb1p,
        Algorithm::InterleavedZeroBubble,
        Algorithm::ZbvZeroBubble,
        Algorithm::DualPipeV,
    ];

    /// The name, as PyTorch and TorchTitan spell it where they have it.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::GPipe => "GPipe",
            Algorithm::OneForwardOneBackward => "1F1B",
            Algorithm::Interleaved1F1B => "Interleaved1F1B",
            Algorithm::LoopedBfs => "LoopedBFS",
            Algorithm::Zb1p => "ZB1P",
            Algorithm::InterleavedZeroBubble => "InterleavedZeroBubble",
            Algorithm::ZbvZeroBubble => "ZBVZeroBubble",
            Algorithm::DualPipeV => "DualPipeV",
            Algorithm::Flexible { .. } => "Flexible",
        }
    }

    /// How many stages a rank holds when nobody says: 1, or 2 where one would leave nothing to interleave.
    pub fn default_stages_per_rank(self) -> usize {
        match self {
            Algorithm::GPipe | Algorithm::OneForwardOneBackward | Algorithm::Zb1p => 1,
            _ => 2,
        }
    }

    /// Whether the schedule has weight gradients of their own, so that its executor must be able to put them off.
    pub fn splits_backward(self) -> bool {
        matches!(
            self,
            Algorithm::Zb1p | Algorithm::InterleavedZeroBubble | Algorithm::ZbvZeroBubble | Algorithm::DualPipeV
        )
    }

    /// The schedule for some number of ranks, stages on each, and microbatches: any of each, but two stages a rank for
    /// the V-shaped ones. It is sound: [`verify`](crate::verify) accepts it.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::TooLarge`], [`Error::StagesPerRank`] for a V-shaped schedule, and [`Error::Round`].
    pub fn generate(self, ranks: usize, stages_per_rank: usize, microbatches: usize) -> Result<Schedule> {
        for (size, what) in [
            (ranks, "the number of ranks"),
            (stages_per_rank, "the number of stages a rank"),
            (microbatches, "the number of microbatches"),
        ] {
            if size == 0 {
                return Err(Error::Zero { what });
            }
        }
        let shape = match self {
            Algorithm::ZbvZeroBubble | Algorithm::DualPipeV => Shape::V,
            _ => Shape::Loop,
        };
        // A schedule in a V is made for at least as many microbatches as fill it.
        let made = if shape == Shape::V { microbatches.max(ranks.saturating_mul(2)) } else { microbatches };
        let forwards = ranks.checked_mul(stages_per_rank).and_then(|stages| stages.checked_mul(made));
        if forwards.is_none_or(|forwards| forwards > MAX_FORWARDS) {
            return Err(Error::TooLarge { ranks, stages_per_rank, microbatches, limit: MAX_FORWARDS });
        }
        if shape == Shape::V && stages_per_rank != 2 {
            return Err(Error::StagesPerRank { name: self.name(), needed: 2, stages_per_rank });
        }
        let each_rank = |steps: &dyn Fn(usize) -> Vec<Step>| (0..ranks).map(steps).collect();
        let interleaved = |zero_bubble: bool| {
            let rounds = Interleaving::rounds_of_at_least(ranks, microbatches);
            Interleaving::new(ranks, stages_per_rank, &rounds, zero_bubble)
        };
        let steps: Vec<Vec<Step>> = match self {
            Algorithm::GPipe => each_rank(&|rank| breadth_first::gpipe(ranks, rank, stages_per_rank, microbatches)),
            Algorithm::LoopedBfs => {
                each_rank(&|rank| breadth_first::looped(ranks, rank, stages_per_rank, microbatches))
            }
            Algorithm::OneForwardOneBackward if stages_per_rank == 1 => {
                let one_stage = interleaved(false).with_shortest_warm_up();
                each_rank(&|rank| one_stage.steps(rank))
            }
            Algorithm::OneForwardOneBackward | Algorithm::Interleaved1F1B => {
                let order = interleaved(false);
                each_rank(&|rank| order.steps(rank))
            }
            Algorithm::Zb1p | Algorithm::InterleavedZeroBubble => {
                let order = interleaved(true);
                each_rank(&|rank| order.steps(rank))
            }
            Algorithm::ZbvZeroBubble => each_rank(&|rank| v_shape::zbv(ranks, rank, microbatches)),
            Algorithm::DualPipeV => each_rank(&|rank| v_shape::dual_pipe_v(ranks, rank, microbatches)),
            Algorithm::Flexible { microbatches_per_round } => {
                if !(1..=microbatches).contains(&microbatches_per_round) {
                    return Err(Error::Round { microbatches_per_round, microbatches });
                }
                let rounds = Interleaving::rounds_of(microbatches_per_round, microbatches);
                let order = Interleaving::new(ranks, stages_per_rank, &rounds, false);
                match order.warm_up_suffices() {
                    true => each_rank(&|rank| order.steps(rank)),
                    false => list_scheduling::steps(&order),
                }
            }
        };
        let placement = (0..ranks * stages_per_rank)
            .map(|stage| match shape {
                Shape::V if stage >= ranks => 2 * ranks - 1 - stage,
                _ => stage % ranks,
            })
            .collect();
        Ok(Schedule { name: self.to_string(), ranks: steps, placement, microbatches })
    }
}

impl fmt::Display for Algorithm {
    /// The name; for the flexible schedule with its round, as `Flexible(5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Algorithm::Flexible { microbatches_per_round } => write!(f, "Flexible({microbatches_per_round})"),
            _ => f.write_str(self.name()),
        }
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    /// Reads a name in any case, with or without `Schedule` before it, as PyTorch's classes have: `1F1B`,
    /// `interleaved1f1b`, `ScheduleDualPipeV`, `Flexible(5)`.
    ///
    /// # Errors
    /// [`Error::UnknownName`] with the nearest name, or with all of them.
    fn from_str(name: &str) -> Result<Self> {
        let unknown = |hint: String| Error::UnknownName { name: name.chars().take(64).collect(), hint };
        let lower: String = name.trim().to_ascii_lowercase();
        let short = lower.strip_prefix("schedule").unwrap_or(&lower);
        if let Some(round) = short.strip_prefix("flexible(").and_then(|rest| rest.strip_suffix(')')) {
            let wrong = |_| unknown("write the microbatches of a round as a number, as in `Flexible(5)`".into());
            return Ok(Algorithm::Flexible { microbatches_per_round: round.trim().parse().map_err(wrong)? });
        }
        if let Some(found) = Algorithm::ALL.into_iter().find(|found| found.name().eq_ignore_ascii_case(short)) {
            return Ok(found);
        }
        match short {
            // Names that the same schedules have, or had, elsewhere.
            "flexibleinterleaved1f1b" => return Ok(Algorithm::Interleaved1F1B),
            "zbh1" | "zb-h1" => return Ok(Algorithm::Zb1p),
            "zbv" => return Ok(Algorithm::ZbvZeroBubble),
            "flexible" => return Err(unknown("say how many microbatches a round has, as in `Flexible(5)`".into())),
            "pipelineschedulesingle" | "pipelineschedulemulti" => {
                return Err(unknown("it stands for a schedule in a CSV file: give the file".into()));
            }
            _ => {}
        }
        let names = Algorithm::ALL.map(Algorithm::name);
        let nearest = names.iter().map(|known| (edit_distance(short, &known.to_ascii_lowercase()), known)).min();
        Err(unknown(match nearest {
            Some((distance, known)) if distance <= known.len() / 3 => format!("did you mean `{known}`?"),
            _ => format!("choose {} or Flexible(N)", names.join(", ")),
        }))
    }
}

/// How many characters must be put in, taken out or changed to turn one text into the other.
fn edit_distance(from: &str, to: &str) -> usize {
    // Of a long text, the length alone says that it is far from every name.
    let from: Vec<char> = from.chars().take(64).collect();
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let changed = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}
