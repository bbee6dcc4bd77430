//! What selective activation checkpointing keeps of a layer's first run, and gives back in its second.

use std::cell::RefCell;
use std::fmt;

use tch::Tensor;

use crate::{Error, Result};

/// An operation that costs more than what its outputs weigh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A matrix product of a projection. The first of a layer is kept, the second is not, the third is, and so on.
    Product,
    /// A matrix product whose terms are then summed over ranks. Counts as a product, and is always kept: computing it
    /// again would mean sending it again.
    SummedProduct,
    /// Attention proper. Always kept.
    Attention,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Product => "a matrix product",
            Self::SummedProduct => "a matrix product summed over ranks",
            Self::Attention => "attention",
        })
    }
}

/// The outputs of `compute`, or those of the same call in the layer's first run, where
/// [`ActivationCheckpoint::by_operation`](crate::ActivationCheckpoint::by_operation) has kept them.
///
/// To be called in the forward of an autograd function, whose backward then works as if the outputs had been computed.
/// They must be new tensors, and nobody may change them in place. Operations within `compute` belong to it, and are not
/// kept by themselves. Outside a layer that is checkpointed by operation this calls `compute` and nothing else.
///
/// # Errors
/// What `compute` gives; [`Error::Recomputation`] where the second run of a layer calls other operations than its
/// first.
pub fn kept<E: From<Error>>(
    operation: Operation,
    compute: impl FnOnce() -> Result<Vec<Tensor>, E>,
) -> Result<Vec<Tensor>, E> {
    let Some(mut run) = Running::take() else { return compute() };
    // The guard stands back in for the run when this returns; meanwhile `compute` finds none.
    let Run { entries, next } = &mut run.0;
    let Some(next) = next else {
        let products = entries.iter().filter(|entry| entry.operation != Operation::Attention).count();
        let keep = operation != Operation::Product || products.is_multiple_of(2);
        let outputs = compute()?;
        let clones = keep.then(|| outputs.iter().map(Tensor::shallow_clone).collect());
        entries.push(Entry { operation, outputs: clones });
        return Ok(outputs);
    };
    let entry = entries.get_mut(*next).ok_or_else(|| differs("nothing more", &operation.to_string()))?;
    if entry.operation != operation {
        return Err(differs(&entry.operation.to_string(), &operation.to_string()).into());
    }
    *next += 1;
    match entry.outputs.take() {
        // Another handle without history: autograd writes the node into the tensor that it is given.
        Some(outputs) => Ok(outputs.iter().map(Tensor::detach).collect()),
        None => compute(),
    }
}

/// Whether this thread is in a layer that is checkpointed by operation.
pub(crate) fn is_running() -> bool {
    RUNNING.with_borrow(Option::is_some)
}

/// What was kept of one run of a layer.
#[derive(Debug, Default)]
pub(crate) struct Kept(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    operation: Operation,
    /// Given away by the second run; a third one, of a graph that was retained, computes them.
    outputs: Option<Vec<Tensor>>,
}

impl Kept {
    /// Runs a layer for the first time.
    pub(crate) fn record<T>(&mut self, layer: impl FnOnce() -> Result<T>) -> Result<T> {
        self.run(None, layer).map(|(output, _)| output)
    }

    /// Runs the layer again.
    pub(crate) fn replay<T>(&mut self, layer: impl FnOnce() -> Result<T>) -> Result<T> {
        let (output, reached) = self.run(Some(0), layer)?;
        match self.0.get(reached.unwrap_or(0)) {
            None => Ok(output),
            Some(missed) => Err(differs(&missed.operation.to_string(), "nothing more")),
        }
    }

    fn run<T>(&mut self, next: Option<usize>, layer: impl FnOnce() -> Result<T>) -> Result<(T, Option<usize>)> {
        RUNNING.set(Some(Run { entries: std::mem::take(&mut self.0), next }));
        // Dropped also where the layer panics.
        struct End;
        impl Drop for End {
            fn drop(&mut self) {
                RUNNING.set(None);
            }
        }
        let end = End;
        let output = layer();
        let run = RUNNING.take();
        drop(end);
        let Run { entries, next } = run.unwrap_or_default();
        self.0 = entries;
        Ok((output?, next))
    }
}

fn differs(first: &str, second: &str) -> Error {
    Error::Recomputation { first: first.into(), second: second.into() }
}

thread_local! {
    /// The run of a layer on this thread. A backward pass may run on a thread of its own, and the second run with it.
    static RUNNING: RefCell<Option<Run>> = const { RefCell::new(None) };
}

#[derive(Debug, Default)]
struct Run {
    entries: Vec<Entry>,
    /// The entry that the second run is at; none in the first.
    next: Option<usize>,
}

/// The run of this thread while one of its operations computes.
struct Running(Run);

impl Running {
    fn take() -> Option<Self> {
        RUNNING.take().map(Self)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.set(Some(std::mem::take(&mut self.0)));
    }
}
