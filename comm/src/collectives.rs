//! The collectives of a group, at once and pending.

use tch::{Kind, Tensor};

use crate::call::{Call, Collective, Cut};
use crate::group::duplicate;
use crate::{Buffers, Group, Op, Pending, ReduceOp, Result};

/// # Collectives
///
/// Each returns when this rank has its result. The forms that end in `_start` return at once with a [`Pending`].
/// Axes count from 0. `sizes` are the lengths of the ranks' parts along an axis, one a rank, in group order, the same
/// list on every rank; a part may be empty.
///
/// All of them fail with [`crate::Error::Argument`] before anything is sent, when their arguments do not fit;
/// with [`crate::Error::Mismatch`] when ranks disagree; with [`crate::Error::Timeout`], [`crate::Error::PeerFailed`] or
/// [`crate::Error::Backend`] otherwise.
impl Group {
    /// The element-wise combination of all ranks' tensors, of any one shape: a new tensor.
    ///
    /// Values of `bf16` and `f16` are combined in `f32` and rounded once.
    pub fn all_reduce(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<Tensor> {
        self.all_reduce_start(tensor, reduce)?.wait()
    }

    /// [`Group::all_reduce`], pending.
    pub fn all_reduce_start(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<Pending<Tensor>> {
        if self.is_single() {
            return Ok(Pending::ready(tensor.shallow_clone()));
        }
        self.start_new(Collective::AllReduce { reduce }, tensor)
    }

    /// [`Group::all_reduce`] in place, which saves the memory of the result. Autograd is not told of the change.
    pub fn all_reduce_(&self, tensor: &mut Tensor, reduce: ReduceOp) -> Result<()> {
        self.all_reduce_start_(tensor, reduce)?.wait()
    }

    /// [`Group::all_reduce_`], pending: the tensor is undetermined until then.
    pub fn all_reduce_start_(&self, tensor: &mut Tensor, reduce: ReduceOp) -> Result<Pending<()>> {
        self.start_in_place(Collective::AllReduce { reduce }, tensor)
    }

    /// The concatenation along `axis` of all ranks' tensors, which have one shape, in rank order: a new tensor, `size`
    /// times as long.
    pub fn all_gather(&self, tensor: &Tensor, axis: usize) -> Result<Tensor> {
        self.all_gather_start(tensor, axis)?.wait()
    }

    /// [`Group::all_gather`], pending.
    pub fn all_gather_start(&self, tensor: &Tensor, axis: usize) -> Result<Pending<Tensor>> {
        let length = self.axis_length(Op::AllGather, &tensor.size(), axis)?;
        self.gather(tensor, Cut { axis, sizes: vec![length; self.size()] })
    }

    /// The concatenation along `axis` of the ranks' tensors, of which rank `i`'s is `sizes[i]` long.
    pub fn all_gather_uneven(&self, tensor: &Tensor, axis: usize, sizes: &[usize]) -> Result<Tensor> {
        self.all_gather_uneven_start(tensor, axis, sizes)?.wait()
    }

    /// [`Group::all_gather_uneven`], pending.
    pub fn all_gather_uneven_start(&self, tensor: &Tensor, axis: usize, sizes: &[usize]) -> Result<Pending<Tensor>> {
        let cut = self.own_cut(Op::AllGather, &tensor.size(), axis, sizes)?;
        self.gather(tensor, cut)
    }

    /// [`Group::all_gather_uneven`] into `output`, a contiguous tensor of the result's shape and kind. Autograd is not
    /// told of the change. A group of size 1 copies.
    pub fn all_gather_into(&self, output: &mut Tensor, tensor: &Tensor, axis: usize, sizes: &[usize]) -> Result<()> {
        self.all_gather_into_start(output, tensor, axis, sizes)?.wait()
    }

    /// [`Group::all_gather_into`], pending: the output is undetermined until then.
    pub fn all_gather_into_start(
        &self,
        output: &mut Tensor,
        tensor: &Tensor,
        axis: usize,
        sizes: &[usize],
    ) -> Result<Pending<()>> {
        let parts = self.own_cut(Op::AllGather, &tensor.size(), axis, sizes)?;
        self.start_into(Collective::AllGather { parts }, output, tensor)
    }

    /// This rank's part along `axis` of the sum of all ranks' tensors, which have one shape: a new tensor, of one
    /// `size`th of the length.
    ///
    /// Values of `bf16` and `f16` are added in `f32` and rounded once.
    pub fn reduce_scatter(&self, tensor: &Tensor, axis: usize) -> Result<Tensor> {
        self.reduce_scatter_start(tensor, axis)?.wait()
    }

    /// [`Group::reduce_scatter`], pending.
    pub fn reduce_scatter_start(&self, tensor: &Tensor, axis: usize) -> Result<Pending<Tensor>> {
        let cut = self.even_cut(Op::ReduceScatter, &tensor.size(), axis)?;
        self.scatter(tensor, cut)
    }

    /// This rank's part along `axis` of the sum of all ranks' tensors: `sizes[rank]` long, after those of the ranks
    /// before it.
    pub fn reduce_scatter_uneven(&self, tensor: &Tensor, axis: usize, sizes: &[usize]) -> Result<Tensor> {
        self.reduce_scatter_uneven_start(tensor, axis, sizes)?.wait()
    }

    /// [`Group::reduce_scatter_uneven`], pending.
    pub fn reduce_scatter_uneven_start(
        &self,
        tensor: &Tensor,
        axis: usize,
        sizes: &[usize],
    ) -> Result<Pending<Tensor>> {
        let cut = self.whole_cut(Op::ReduceScatter, &tensor.size(), axis, sizes)?;
        self.scatter(tensor, cut)
    }

    /// [`Group::reduce_scatter_uneven`] into `output`, a contiguous tensor of the result's shape and kind. Autograd is
    /// not told of the change. A group of size 1 copies.
    pub fn reduce_scatter_into(
        &self,
        output: &mut Tensor,
        tensor: &Tensor,
        axis: usize,
        sizes: &[usize],
    ) -> Result<()> {
        self.reduce_scatter_into_start(output, tensor, axis, sizes)?.wait()
    }

    /// [`Group::reduce_scatter_into`], pending: the output is undetermined until then.
    pub fn reduce_scatter_into_start(
        &self,
        output: &mut Tensor,
        tensor: &Tensor,
        axis: usize,
        sizes: &[usize],
    ) -> Result<Pending<()>> {
        let parts = self.whole_cut(Op::ReduceScatter, &tensor.size(), axis, sizes)?;
        self.start_into(Collective::ReduceScatter { parts }, output, tensor)
    }

    /// Cuts the tensor along `split_axis` into equal parts, gives the `i`th to rank `i`, and concatenates what arrives
    /// along `concat_axis`, in rank order. The inverse has the axes swapped.
    pub fn all_to_all(&self, tensor: &Tensor, split_axis: usize, concat_axis: usize) -> Result<Tensor> {
        self.all_to_all_start(tensor, split_axis, concat_axis)?.wait()
    }

    /// [`Group::all_to_all`], pending.
    pub fn all_to_all_start(&self, tensor: &Tensor, split_axis: usize, concat_axis: usize) -> Result<Pending<Tensor>> {
        let (split, concat) = self.exchange_cuts(&tensor.size(), split_axis, concat_axis, None)?;
        self.exchange(tensor, split, concat)
    }

    /// [`Group::all_to_all`] with parts of any length: `split_sizes[i]` along `split_axis` go to rank `i`, and
    /// `concat_sizes[i]` along `concat_axis` arrive from rank `i`.
    ///
    /// With two different axes, both lists are the same on all ranks, and `concat_sizes[rank]` is the length of this
    /// rank's own tensor. With one and the same axis, each rank has lists of its own: what `i` sends to `j` is what `j`
    /// expects from `i`. The inverse has axes and lists swapped.
    pub fn all_to_all_uneven(
        &self,
        tensor: &Tensor,
        split_axis: usize,
        concat_axis: usize,
        split_sizes: &[usize],
        concat_sizes: &[usize],
    ) -> Result<Tensor> {
        self.all_to_all_uneven_start(tensor, split_axis, concat_axis, split_sizes, concat_sizes)?.wait()
    }

    /// [`Group::all_to_all_uneven`], pending.
    pub fn all_to_all_uneven_start(
        &self,
        tensor: &Tensor,
        split_axis: usize,
        concat_axis: usize,
        split_sizes: &[usize],
        concat_sizes: &[usize],
    ) -> Result<Pending<Tensor>> {
        let sizes = Some((split_sizes, concat_sizes));
        let (split, concat) = self.exchange_cuts(&tensor.size(), split_axis, concat_axis, sizes)?;
        self.exchange(tensor, split, concat)
    }

    /// The tensor of group rank `root`. The others bring a tensor of its shape and kind, whose values do not matter.
    /// On the root the result shares storage with its own tensor.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Tensor> {
        self.broadcast_start(tensor, root)?.wait()
    }

    /// [`Group::broadcast`], pending.
    pub fn broadcast_start(&self, tensor: &Tensor, root: usize) -> Result<Pending<Tensor>> {
        self.check_rank(Op::Broadcast, root)?;
        if self.is_single() {
            return Ok(Pending::ready(tensor.shallow_clone()));
        }
        let what = Collective::Broadcast { root };
        if self.rank() == root {
            let output = tensor.shallow_clone();
            return self.start_with(what, tensor, None, move |_| Ok(output));
        }
        self.start_new(what, tensor)
    }

    /// [`Group::broadcast`] in place. Autograd is not told of the change.
    pub fn broadcast_(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        self.broadcast_start_(tensor, root)?.wait()
    }

    /// [`Group::broadcast_`], pending: the tensor is undetermined until then.
    pub fn broadcast_start_(&self, tensor: &mut Tensor, root: usize) -> Result<Pending<()>> {
        self.check_rank(Op::Broadcast, root)?;
        self.start_in_place(Collective::Broadcast { root }, tensor)
    }

    /// Sends a tensor to group rank `to`, which receives it with the same shape and kind. Returns at once; the tensor
    /// may be changed at once. Messages between two ranks arrive in the order in which they were sent.
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        self.check_rank(Op::Send, to)?;
        let input = self.prepare(Op::Send, tensor)?;
        // A non-contiguous tensor has been copied already.
        let input = match input.data_ptr() == tensor.data_ptr() {
            true => duplicate(&input).map_err(|error| self.members().backend(Op::Send, error))?,
            false => input,
        };
        let call = Call { what: Collective::Send { to }, shape: input.size(), kind: input.kind() };
        let buffers = Buffers { input: Some(input), output: None, donated: true };
        self.start(call, buffers, |_| Ok(()))?.wait()
    }

    /// [`Group::send`] without a copy: the tensor must not be changed before the end, which may be as late as its
    /// arrival.
    pub fn send_start(&self, tensor: &Tensor, to: usize) -> Result<Pending<()>> {
        self.check_rank(Op::Send, to)?;
        self.start_with(Collective::Send { to }, tensor, None, |_| Ok(()))
    }

    /// Receives a tensor of this shape and kind from group rank `from`: a new tensor.
    pub fn recv(&self, shape: &[i64], kind: Kind, from: usize) -> Result<Tensor> {
        self.recv_start(shape, kind, from)?.wait()
    }

    /// [`Group::recv`], pending.
    pub fn recv_start(&self, shape: &[i64], kind: Kind, from: usize) -> Result<Pending<Tensor>> {
        self.check_rank(Op::Recv, from)?;
        if shape.iter().any(|&length| length < 0) {
            return Err(self.members().argument(Op::Recv, format!("the shape {shape:?} has a negative length")));
        }
        let call = Call { what: Collective::Recv { from }, shape: shape.to_vec(), kind };
        self.start(call, Buffers::default(), Ok)
    }

    /// Returns once every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        if self.is_single() {
            return Ok(());
        }
        let call = Call { what: Collective::Barrier, shape: vec![0], kind: Kind::Uint8 };
        self.start(call, Buffers::default(), |_| Ok(()))?.wait()
    }

    fn gather(&self, tensor: &Tensor, parts: Cut) -> Result<Pending<Tensor>> {
        if self.is_single() {
            return Ok(Pending::ready(tensor.shallow_clone()));
        }
        self.start_new(Collective::AllGather { parts }, tensor)
    }

    fn scatter(&self, tensor: &Tensor, parts: Cut) -> Result<Pending<Tensor>> {
        if self.is_single() {
            return Ok(Pending::ready(tensor.shallow_clone()));
        }
        self.start_new(Collective::ReduceScatter { parts }, tensor)
    }

    fn exchange(&self, tensor: &Tensor, split: Cut, concat: Cut) -> Result<Pending<Tensor>> {
        if self.is_single() {
            return Ok(Pending::ready(tensor.shallow_clone()));
        }
        self.start_new(Collective::AllToAll { split, concat }, tensor)
    }
}
