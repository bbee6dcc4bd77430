//! A collective among tensors of one address space, divided into one task per rank.
//!
//! Any thread may perform any task, in any order and at the same time as others: tasks write to different memory, and
//! what one computes does not depend on who computes it. Values are combined in rank order, element by element, so the
//! result is the same to the bit however the work was divided.

use tch::{Kind, TchError, Tensor};

use crate::call::{Call, Collective};
use crate::group::duplicate;
use crate::{Buffers, ReduceOp};

/// How many elements are combined at a time: few enough that the running result stays in a core's second-level cache.
const BLOCK: i64 = 1 << 16;

/// What one rank has brought. Tensors are contiguous.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) call: Call,
    input: Option<Tensor>,
    output: Option<Tensor>,
}

impl Part {
    /// Allocates the result where every task writes a piece of it.
    pub(super) fn new(call: Call, buffers: Buffers) -> Result<Self, TchError> {
        let Buffers { input, mut output, .. } = buffers;
        if let (Collective::AllReduce { .. }, Some(input), None) = (&call.what, &input, &output) {
            output = Some(input.f_empty_like()?);
        }
        Ok(Part { call, input, output })
    }

    /// Another handle to the same tensors.
    pub(super) fn share(&self) -> Self {
        let share = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Part { call: self.call.clone(), input: share(&self.input), output: share(&self.output) }
    }

    /// Lets go of what is not needed any more once all tasks are done.
    pub(super) fn release_input(&mut self) {
        self.input = None;
    }

    /// The result, where tasks wrote into memory that was there before.
    pub(super) fn take_output(&mut self) -> Option<Tensor> {
        self.output.take()
    }

    fn input(&self) -> Result<&Tensor, TchError> {
        self.input.as_ref().ok_or_else(|| TchError::Torch(format!("{} needs a tensor on every rank", self.call)))
    }
}

/// How many tasks a collective of `size` ranks consists of.
pub(super) fn tasks(call: &Call, size: usize) -> usize {
    match call.what {
        Collective::Barrier => 0,
        _ => size,
    }
}

/// Performs one task. Gives the result of rank `task` if this made it; an all-reduce leaves it in the parts instead.
pub(super) fn perform(parts: &[Part], task: usize) -> Result<Option<Tensor>, TchError> {
    let _no_grad = tch::no_grad_guard();
    let own = &parts[task];
    match &own.call.what {
        Collective::AllReduce { reduce } => reduce_range(parts, task, *reduce).map(|()| None),
        Collective::ReduceScatter { parts: cut } => {
            let narrow = |part: &Part| part.input()?.f_narrow(cut.axis as i64, cut.offset(task), cut.sizes[task]);
            let slices = parts.iter().map(narrow).collect::<Result<Vec<_>, _>>()?;
            let output = match &own.output {
                Some(output) => output.shallow_clone(),
                None => Tensor::f_empty(slices[task].size(), (own.call.kind, slices[task].device()))?,
            };
            combine(&[output.shallow_clone()], &slices, ReduceOp::Sum)?;
            Ok(Some(output))
        }
        Collective::AllGather { parts: cut } => {
            let inputs = parts.iter().map(Part::input).collect::<Result<Vec<_>, _>>()?;
            concatenate(&inputs, cut.axis, own.output.as_ref()).map(Some)
        }
        Collective::AllToAll { concat, .. } => {
            let slice = |part: &Part| match &part.call.what {
                Collective::AllToAll { split, .. } => {
                    part.input()?.f_narrow(split.axis as i64, split.offset(task), split.sizes[task])
                }
                _ => Err(TchError::Torch(format!("{} among all-to-alls", part.call))),
            };
            let slices = parts.iter().map(slice).collect::<Result<Vec<_>, _>>()?;
            concatenate(&slices.iter().collect::<Vec<_>>(), concat.axis, own.output.as_ref()).map(Some)
        }
        Collective::Broadcast { root } => {
            let source = parts[*root].input()?;
            if task == *root {
                return Ok(Some(source.shallow_clone()));
            }
            match &own.output {
                Some(output) => {
                    let mut output = output.shallow_clone();
                    output.f_copy_(source)?;
                    Ok(Some(output))
                }
                None => duplicate(source).map(Some),
            }
        }
        Collective::Barrier | Collective::Send { .. } | Collective::Recv { .. } => Ok(None),
    }
}

fn concatenate(pieces: &[&Tensor], axis: usize, output: Option<&Tensor>) -> Result<Tensor, TchError> {
    match output {
        Some(output) => Tensor::f_cat_out(output, pieces, axis as i64),
        None => Tensor::f_cat(pieces, axis as i64),
    }
}

/// Combines the `task`th of equally many ranges of the flattened tensors, into that range of every rank's output. An
/// output may be the rank's own input, since no other task touches that range of either.
fn reduce_range(parts: &[Part], task: usize, reduce: ReduceOp) -> Result<(), TchError> {
    let (size, total) = (parts.len() as i64, parts[task].input()?.numel() as i64);
    let bound = |task: i64| total / size * task + (total % size * task) / size;
    let (start, end) = (bound(task as i64), bound(task as i64 + 1));
    let range = |tensor: &Tensor| tensor.f_view([-1])?.f_narrow(0, start, end - start);
    if start == end {
        return Ok(());
    }
    let inputs = parts.iter().map(|part| range(part.input()?)).collect::<Result<Vec<_>, _>>()?;
    let outputs = parts.iter().map(|part| range(part.output.as_ref().unwrap_or(part.input()?)));
    combine(&outputs.collect::<Result<Vec<_>, _>>()?, &inputs, reduce)
}

/// Combines the inputs in their order, block by block, into all of the outputs. The first output may be the first
/// input, and any other output any input.
pub(super) fn combine(outputs: &[Tensor], inputs: &[Tensor], reduce: ReduceOp) -> Result<(), TchError> {
    let shape = outputs[0].size();
    let elements: i64 = shape.iter().product();
    if elements == 0 {
        return Ok(());
    }
    let longest = shape.iter().position(|&length| length > 1);
    let (Some(axis), true) = (longest, elements > BLOCK) else {
        return combine_block(outputs, inputs, reduce);
    };
    let half = shape[axis] / 2;
    for (start, length) in [(0, half), (half, shape[axis] - half)] {
        let narrow = |tensors: &[Tensor]| -> Result<Vec<_>, _> {
            tensors.iter().map(|tensor| tensor.f_narrow(axis as i64, start, length)).collect()
        };
        combine(&narrow(outputs)?, &narrow(inputs)?, reduce)?;
    }
    Ok(())
}

fn combine_block(outputs: &[Tensor], inputs: &[Tensor], reduce: ReduceOp) -> Result<(), TchError> {
    let into = |sum: &Tensor, a: &Tensor, b: &Tensor| {
        let written = match reduce {
            ReduceOp::Sum => a.f_add_out(sum, b),
            ReduceOp::Product => a.f_mul_out(sum, b),
            ReduceOp::Min => a.f_minimum_out(sum, b),
            ReduceOp::Max => a.f_maximum_out(sum, b),
        };
        written.map(drop)
    };
    let mut first = outputs[0].shallow_clone();
    match (first.kind(), inputs) {
        (kind, [head, rest @ ..]) if is_half(kind) => {
            let sum = head.f_to_kind(Kind::Float)?;
            for input in rest {
                into(&sum, &sum, &input.f_to_kind(Kind::Float)?)?;
            }
            first.f_copy_(&sum)?;
        }
        (_, [one, two, rest @ ..]) => {
            into(&first, one, two)?;
            for input in rest {
                into(&first, &first, input)?;
            }
        }
        (_, [only]) => first.f_copy_(only)?,
        (_, []) => {}
    }
    for output in &outputs[1..] {
        output.shallow_clone().f_copy_(&first)?;
    }
    Ok(())
}

/// Whether values of this kind are combined in `f32`.
pub(super) fn is_half(kind: Kind) -> bool {
    matches!(kind, Kind::BFloat16 | Kind::Half)
}
