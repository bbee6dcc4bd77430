//! The operations of a group.

use std::ffi::c_int;

use tch::{Kind, Tensor};

use super::{Backend, ProcessGroup, ReduceOp, Work};
use crate::ffi::{self, Failure, RawWork};
use crate::list::TensorList;
use crate::{Error, Result, storage};

/// Codes of `ft_group_collective`.
#[derive(Clone, Copy)]
enum Collective {
    AllReduce = 0,
    AllGatherInto = 1,
    AllGather = 2,
    ReduceScatterFrom = 3,
    ReduceScatter = 4,
    Broadcast = 5,
    Reduce = 6,
    Gather = 7,
    Scatter = 8,
}

impl ProcessGroup {
    /// Reduces `tensor` over all ranks, in place, on every rank.
    ///
    /// # Errors
    /// As every operation: [`Error::Torch`] or [`Error::Argument`] when the tensors do not fit, here or from
    /// [`Work::wait`]; [`Error::Torch`] when a peer is gone.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        self.collective("all_reduce", Collective::AllReduce, &[tensor], &[], Some(op), 0)
    }

    /// Gathers the ranks' `input`s, all of one shape, into `output`, in the order of ranks: `output` has `size` times
    /// the elements.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn all_gather_into(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        self.collective("all_gather_into", Collective::AllGatherInto, &[output], &[input], None, 0)
    }

    /// Gathers the ranks' `input`s into `outputs`, one for each rank. Shapes may differ from rank to rank.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn all_gather(&self, outputs: &[Tensor], input: &Tensor) -> Result<Work> {
        const OP: &str = "all_gather";
        self.check_count(OP, "outputs", outputs.len())?;
        check_size(OP, "the output of this rank", &outputs[self.rank], "the input", input)?;
        if self.backend == Backend::Nccl || same_sizes(outputs) {
            return self.collective(OP, Collective::AllGather, &refs(outputs), &[input], None, 0);
        }
        // Gloo gathers equal shapes only; every rank's part as a broadcast moves the same bytes.
        storage::overwrite(&outputs[self.rank], input)?;
        let parts = outputs.iter().enumerate().map(|(root, output)| self.broadcast(output, root));
        Ok(Work::all(OP, parts.collect::<Result<Vec<_>>>()?))
    }

    /// Reduces `input` over all ranks and leaves to each its part: `input` has `size` times the elements of `output`,
    /// in the order of ranks.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn reduce_scatter_from(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Result<Work> {
        self.collective("reduce_scatter_from", Collective::ReduceScatterFrom, &[output], &[input], Some(op), 0)
    }

    /// Reduces `inputs`, one for each rank, and leaves to each rank its own in `output`. Their shapes may differ.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn reduce_scatter(&self, output: &Tensor, inputs: &[Tensor], op: ReduceOp) -> Result<Work> {
        const OP: &str = "reduce_scatter";
        self.check_count(OP, "inputs", inputs.len())?;
        check_size(OP, "the input of this rank", &inputs[self.rank], "the output", output)?;
        if self.backend == Backend::Nccl || same_sizes(inputs) {
            return self.collective(OP, Collective::ReduceScatter, &[output], &refs(inputs), Some(op), 0);
        }
        let mut parts = Vec::with_capacity(inputs.len());
        for (root, input) in inputs.iter().enumerate() {
            // A reduction uses its tensor as scratch on every rank, and inputs stay as they are.
            let scratch = if root == self.rank { output.shallow_clone() } else { torch(OP, input.f_empty_like())? };
            storage::overwrite(&scratch, input)?;
            parts.push(self.reduce(&scratch, root, op)?);
        }
        Ok(Work::all(OP, parts))
    }

    /// Sends `input_splits[r]` rows of `input` to rank `r`, and receives `output_splits[r]` rows of `output` from it.
    /// Rows are slices along axis 0.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn all_to_all(
        &self,
        output: &Tensor,
        input: &Tensor,
        output_splits: &[i64],
        input_splits: &[i64],
    ) -> Result<Work> {
        const OP: &str = "all_to_all";
        self.check_count(OP, "output splits", output_splits.len())?;
        self.check_count(OP, "input splits", input_splits.len())?;
        self.start(OP, |failure, work| {
            // SAFETY: group and tensors are live; both arrays have `size` elements.
            unsafe {
                ffi::ft_group_all_to_all(
                    self.raw,
                    output.as_ptr(),
                    input.as_ptr(),
                    output_splits.as_ptr(),
                    input_splits.as_ptr(),
                    self.size,
                    failure,
                    work,
                )
            }
        })
    }

    /// Copies `tensor` of rank `root` to `tensor` of all others.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        self.collective("broadcast", Collective::Broadcast, &[tensor], &[], None, root)
    }

    /// Reduces `tensor` over all ranks, in place, on rank `root`; on other ranks its content is undefined afterwards.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn reduce(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<Work> {
        self.collective("reduce", Collective::Reduce, &[tensor], &[], Some(op), root)
    }

    /// Gathers the ranks' `input`s, all of one shape, on rank `root` into `outputs`, one for each rank; empty on other
    /// ranks.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn gather(&self, outputs: &[Tensor], input: &Tensor, root: usize) -> Result<Work> {
        self.check_root_list("gather", "outputs", outputs, root)?;
        self.collective("gather", Collective::Gather, &refs(outputs), &[input], None, root)
    }

    /// Copies to each rank's `output` its own of the `inputs` of rank `root`, all of one shape; empty on other ranks.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn scatter(&self, output: &Tensor, inputs: &[Tensor], root: usize) -> Result<Work> {
        self.check_root_list("scatter", "inputs", inputs, root)?;
        self.collective("scatter", Collective::Scatter, &[output], &refs(inputs), None, root)
    }

    /// Sends `tensor` to rank `peer`. Messages between two ranks with one tag arrive in order; NCCL ignores the tag.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn send(&self, tensor: &Tensor, peer: usize, tag: i32) -> Result<Work> {
        self.transfer("send", true, tensor, peer, tag)
    }

    /// Receives into `tensor` from rank `peer`.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn recv(&self, tensor: &Tensor, peer: usize, tag: i32) -> Result<Work> {
        self.transfer("recv", false, tensor, peer, tag)
    }

    /// Waits, once its work is waited for, until all ranks have come here.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn barrier(&self) -> Result<Work> {
        // SAFETY: the group is live.
        self.start("barrier", |failure, work| unsafe { ffi::ft_group_barrier(self.raw, failure, work) })
    }

    fn collective(
        &self,
        op: &'static str,
        which: Collective,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        reduce: Option<ReduceOp>,
        root: usize,
    ) -> Result<Work> {
        let root = self.check_peer(op, root)?;
        let outputs = TensorList::of(outputs.iter().copied());
        let inputs = TensorList::of(inputs.iter().copied());
        self.start(op, |failure, work| {
            // SAFETY: the group and both lists are live.
            unsafe {
                ffi::ft_group_collective(
                    self.raw,
                    which as c_int,
                    outputs.as_ptr(),
                    inputs.as_ptr(),
                    reduce.map_or(0, ReduceOp::code),
                    root,
                    failure,
                    work,
                )
            }
        })
    }

    fn transfer(&self, op: &'static str, send: bool, tensor: &Tensor, peer: usize, tag: i32) -> Result<Work> {
        let raw_peer = self.check_peer(op, peer)?;
        if peer == self.rank {
            return Err(Error::argument(op, format!("rank {peer} cannot exchange messages with itself")));
        }
        self.start(op, |failure, work| {
            // SAFETY: group and tensor are live.
            unsafe { ffi::ft_group_transfer(self.raw, tensor.as_ptr(), send, raw_peer, tag, failure, work) }
        })
    }

    fn start(&self, op: &'static str, start: impl FnOnce(*mut Failure, *mut *mut RawWork) -> c_int) -> Result<Work> {
        let _one_at_a_time = self.lock();
        let mut raw = std::ptr::null_mut();
        ffi::call(op, |failure| start(failure, &raw mut raw))?;
        Ok(Work::new(op, raw))
    }

    fn check_count(&self, op: &'static str, what: &str, count: usize) -> Result<()> {
        if count == self.size {
            return Ok(());
        }
        Err(Error::argument(op, format!("{count} {what} for a group of {}; give one for each rank", self.size)))
    }

    fn check_root_list(&self, op: &'static str, what: &str, tensors: &[Tensor], root: usize) -> Result<()> {
        if root == self.rank {
            self.check_count(op, what, tensors.len())
        } else if tensors.is_empty() {
            Ok(())
        } else {
            Err(Error::argument(op, format!("only the root gives {what}; pass none on rank {}", self.rank)))
        }
    }

    fn check_peer(&self, op: &'static str, peer: usize) -> Result<i32> {
        i32::try_from(peer).ok().filter(|_| peer < self.size).ok_or_else(|| {
            Error::argument(op, format!("no rank {peer} in a group of {}; ranks count from 0", self.size))
        })
    }
}

fn refs(tensors: &[Tensor]) -> Vec<&Tensor> {
    tensors.iter().collect()
}

fn same_sizes(tensors: &[Tensor]) -> bool {
    tensors.windows(2).all(|pair| pair[0].size() == pair[1].size())
}

fn check_size(op: &'static str, left_name: &str, left: &Tensor, right_name: &str, right: &Tensor) -> Result<()> {
    let (left_shape, right_shape) = (left.size(), right.size());
    let (left_kind, right_kind): (Kind, Kind) = (torch(op, left.f_kind())?, torch(op, right.f_kind())?);
    if left_shape == right_shape && left_kind == right_kind {
        return Ok(());
    }
    Err(Error::argument(
        op,
        format!(
            "{left_name} is {left_kind:?}{left_shape:?} and {right_name} is {right_kind:?}{right_shape:?}; \
             they must be the same"
        ),
    ))
}

fn torch<T>(op: &'static str, result: Result<T, tch::TchError>) -> Result<T> {
    result.map_err(|error| Error::Torch { op, message: error.to_string() })
}
