//! PyTorch's text form: a line for each rank, a cell for each action, empty cells where a rank idles.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::str::FromStr;

use crate::action::{Action, Kind, Schedule, Step};
use crate::error::{Error, Result, Unsound};
use crate::lowered::{Lowered, Message, Op, Payload};
use crate::simulate;
use crate::timeline::Span;

impl Schedule {
    /// Reads a CSV as PyTorch writes and reads it: a line for each rank, cells as `0F3`, `1I0`, `1W0`, `2B1`,
    /// overlapped pairs as `(0F3;3B1)OVERLAP_F_B` or `(0F3;3B1)`, and empty cells, which say nothing here.
    /// Communication in the cells (`0SEND_F3`, `1UNSHARD`) is left out; see [`Lowered::from_csv`].
    ///
    /// A stage lies on the first rank whose line has it. Whether the schedule makes sense is for
    /// [`verify`](crate::verify) to say.
    ///
    /// # Errors
    /// [`Error::Csv`] with the line and the column of the first cell that is not an action, or of a stage number that
    /// leaves a gap.
    pub fn from_csv(name: impl Into<String>, text: &str) -> Result<Self> {
        Ok(Lowered::from_csv(name, text)?.schedule())
    }

    /// The CSV, without empty cells. [`Schedule::from_csv`] reads it back.
    pub fn to_csv(&self) -> String {
        let lines = self.ranks.iter().map(|steps| cells(steps.iter().map(ToString::to_string)));
        lines.collect()
    }

    /// The CSV with an empty cell wherever a rank idles if every step takes equally long: a column is a moment.
    ///
    /// # Errors
    /// [`Unsound`] if the schedule is.
    pub fn to_aligned_csv(&self) -> std::result::Result<String, Unsound> {
        let spans = simulate::run(self, |_| 1.0, 0.0)?;
        let end = spans.iter().flatten().map(|span| span.end as usize).max().unwrap_or(0);
        let line = |spans: &Vec<Span>| {
            let mut line = String::new();
            let mut column = 0;
            let mut move_to = |line: &mut String, to: usize| {
                line.extend(std::iter::repeat_n(',', to - column));
                column = to;
            };
            for span in spans {
                move_to(&mut line, span.start as usize);
                line.push_str(&span.step.to_string());
            }
            move_to(&mut line, end - 1);
            line + "\n"
        };
        Ok(spans.iter().map(line).collect())
    }
}

impl Lowered {
    /// Reads a CSV with or without communication: beside the cells of [`Schedule::from_csv`], `0SEND_F3` and `1RECV_F3`
    /// (an activation of microbatch 3 from stage 0 to stage 1), `1SEND_B3` and `0RECV_B3` (the gradient's way back),
    /// `0UNSHARD`, `0RESHARD` and `0REDUCE_GRAD`.
    ///
    /// Whether the lists make sense is for [`Lowered::check`] to say.
    ///
    /// # Errors
    /// As [`Schedule::from_csv`].
    pub fn from_csv(name: impl Into<String>, text: &str) -> Result<Self> {
        let cells = read(text)?;
        let mut ranks: Vec<Vec<Op>> = Vec::new();
        // The first place of every stage that computes.
        let mut stages: BTreeMap<usize, &Cell> = BTreeMap::new();
        let mut microbatches = 0;
        for line in &cells {
            for cell in line {
                let Op::Compute(step) = cell.op else { continue };
                for action in step.actions() {
                    stages.entry(action.stage).or_insert(cell);
                    microbatches = microbatches.max(action.microbatch + 1);
                }
            }
            ranks.push(line.iter().map(|cell| cell.op).collect());
        }
        for (at, (&stage, cell)) in stages.iter().enumerate() {
            if stage != at {
                return Err(cell.error(format!("stage {stage} comes here, but no cell computes stage {at}")));
            }
        }
        for cell in cells.iter().flatten() {
            let stage = match cell.op {
                Op::Compute(_) => continue,
                Op::Send(message) | Op::Receive(message) => message.source.max(message.target()),
                Op::Unshard(stage) | Op::Reshard(stage) | Op::ReduceGradient(stage) => stage,
            };
            if !stages.contains_key(&stage) {
                return Err(cell.error(format!("`{}` concerns stage {stage}, which no cell computes", cell.op)));
            }
        }
        if stages.is_empty() {
            return Err(Error::Csv { line: 1, column: 1, reason: "no cell holds an action such as `0F3`".into() });
        }
        let placement = stages.values().map(|cell| cell.rank).collect();
        Ok(Self { name: name.into(), ranks, placement, microbatches })
    }

    /// The CSV. [`Lowered::from_csv`] reads it back.
    pub fn to_csv(&self) -> String {
        self.ranks.iter().map(|ops| cells(ops.iter().map(ToString::to_string))).collect()
    }
}

fn cells(cells: impl Iterator<Item = String>) -> String {
    let mut line = cells.collect::<Vec<_>>().join(",");
    line.push('\n');
    line
}

struct Cell {
    op: Op,
    rank: usize,
    line: usize,
    column: usize,
}

impl Cell {
    fn error(&self, reason: String) -> Error {
        Error::Csv { line: self.line, column: self.column, reason }
    }
}

/// All cells that are not empty, by line. Empty lines at the end are none.
fn read(text: &str) -> Result<Vec<Vec<Cell>>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text).trim_end();
    let mut lines = Vec::new();
    for (rank, text) in text.lines().enumerate() {
        let mut cells = Vec::new();
        let mut column = 1;
        for cell in text.split(',') {
            let trimmed = cell.trim();
            if !trimmed.is_empty() {
                let (line, column) = (rank + 1, column + cell.chars().take_while(|c| c.is_whitespace()).count());
                let op = self::cell(trimmed).map_err(|reason| Error::Csv { line, column, reason })?;
                cells.push(Cell { op, rank, line, column });
            }
            column += cell.chars().count() + 1;
        }
        lines.push(cells);
    }
    Ok(lines)
}

impl FromStr for Step {
    type Err = Error;

    /// Reads a computation as [`Step`] displays it, and as it stands in CSV: `0F3`, or `(0F3;3B1)OVERLAP_F_B`.
    ///
    /// # Errors
    /// [`Error::Csv`].
    fn from_str(text: &str) -> Result<Self> {
        let other = || format!("`{}` is no computation", shown(text));
        let read = cell(text).and_then(|op| match op {
            Op::Compute(step) => Ok(step),
            _ => Err(other()),
        });
        read.map_err(|reason| Error::Csv { line: 1, column: 1, reason })
    }
}

/// A cell that could not be read, as it may be shown.
fn shown(text: &str) -> String {
    let mut shown = String::new();
    for (at, c) in text.chars().enumerate() {
        if at == 32 {
            shown.push('…');
            break;
        }
        let _ = write!(shown, "{}", c.escape_debug());
    }
    shown
}

/// Reads a cell that is not empty; or says what is wrong with it.
fn cell(text: &str) -> std::result::Result<Op, String> {
    if let Some(rest) = text.strip_prefix('(') {
        return pair(rest).map(Op::Compute).ok_or_else(|| {
            format!("`{}` is not a pair of a forward and a backward, as in `(0F3;3B1)OVERLAP_F_B`", shown(text))
        });
    }
    let unknown = || {
        format!(
            "`{}` is not an action: write a stage, a kind (F, B, I or W) and a microbatch, as in `2F0`",
            shown(text)
        )
    };
    let (stage, rest) = split_number(text).ok_or_else(unknown)?;
    let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
    let (kind, microbatch) = rest.split_at(letters);
    let microbatch = match microbatch {
        "" => None,
        digits => Some(split_number(digits).filter(|(_, rest)| rest.is_empty()).ok_or_else(unknown)?.0),
    };
    let next = |payload| match payload {
        Payload::Activation => stage.checked_sub(1),
        Payload::Gradient => Some(stage + 1),
    };
    let send = |payload, microbatch| Op::Send(Message { payload, source: stage, microbatch });
    match (kind, microbatch) {
        ("F", Some(microbatch)) => Ok(Op::Compute(Action::new(Kind::Forward, stage, microbatch).into())),
        ("B", Some(microbatch)) => Ok(Op::Compute(Action::new(Kind::Backward, stage, microbatch).into())),
        ("I", Some(microbatch)) => Ok(Op::Compute(Action::new(Kind::InputGradient, stage, microbatch).into())),
        ("W", Some(microbatch)) => Ok(Op::Compute(Action::new(Kind::WeightGradient, stage, microbatch).into())),
        ("SEND_F", Some(microbatch)) => Ok(send(Payload::Activation, microbatch)),
        ("SEND_B", Some(microbatch)) if stage > 0 => Ok(send(Payload::Gradient, microbatch)),
        ("RECV_F" | "RECV_B", Some(microbatch)) => {
            let payload = if kind == "RECV_F" { Payload::Activation } else { Payload::Gradient };
            let source = next(payload).ok_or("stage 0 has no stage before it to receive from")?;
            Ok(Op::Receive(Message { payload, source, microbatch }))
        }
        ("SEND_B", Some(_)) => Err("stage 0 has no stage before it to send to".into()),
        ("UNSHARD", None) => Ok(Op::Unshard(stage)),
        ("RESHARD", None) => Ok(Op::Reshard(stage)),
        ("REDUCE_GRAD", None) => Ok(Op::ReduceGradient(stage)),
        ("F" | "B" | "I" | "W" | "SEND_F" | "SEND_B" | "RECV_F" | "RECV_B", None) => {
            Err(format!("`{}` lacks its microbatch, as in `{}0`", shown(text), shown(text)))
        }
        ("UNSHARD" | "RESHARD" | "REDUCE_GRAD", Some(_)) => {
            Err(format!("`{}` has a microbatch, but concerns a whole stage, as in `{stage}{kind}`", shown(text)))
        }
        _ => Err(unknown()),
    }
}

/// The number at the start of a text, and the rest. At most 9 digits.
fn split_number(text: &str) -> Option<(usize, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at(digits);
    (digits <= 9).then(|| number.parse().ok())?.map(|number| (number, rest))
}

/// A pair after its opening parenthesis.
fn pair(text: &str) -> Option<Step> {
    let (inside, after) = text.split_once(')')?;
    if !matches!(after.trim(), "" | "OVERLAP_F_B") {
        return None;
    }
    let (first, second) = inside.split_once(';')?;
    let action = |text: &str| match cell(text.trim()) {
        Ok(Op::Compute(Step::One(action))) => Some(action),
        _ => None,
    };
    let (forward, backward) = (action(first)?, action(second)?);
    (forward.kind == Kind::Forward && backward.kind.gives_input_gradient()).then_some(Step::Pair { forward, backward })
}
