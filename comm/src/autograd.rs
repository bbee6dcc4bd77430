//! Collectives as differentiable functions: every one is a linear map over the ranks, and its backward another.

use ferrotitan_ext::autograd::{self, Context, Function};
use tch::Tensor;

use crate::call::{Collective, Cut};
use crate::{BoxError, Error, Group, Op, ReduceOp, Result};

/// A linear map from one tensor per rank to one tensor per rank.
#[derive(Clone, Debug)]
enum Map {
    Identity,
    Sum,
    Gather(Cut),
    Scatter(Cut),
    Exchange { split: Cut, concat: Cut },
    Own(Cut),
}

impl Map {
    fn op(&self) -> Op {
        match self {
            Map::Identity | Map::Sum => Op::AllReduce,
            Map::Gather(_) | Map::Own(_) => Op::AllGather,
            Map::Scatter(_) => Op::ReduceScatter,
            Map::Exchange { .. } => Op::AllToAll,
        }
    }

    fn apply(&self, group: &Group, tensor: &Tensor) -> Result<Tensor> {
        let what = match self {
            Map::Identity => return Ok(tensor.shallow_clone()),
            Map::Own(cut) => {
                let rank = group.rank();
                let own = tensor.f_narrow(cut.axis as i64, cut.offset(rank), cut.sizes[rank]);
                return own.map_err(|error| group.members().backend(self.op(), error));
            }
            Map::Sum => Collective::AllReduce { reduce: ReduceOp::Sum },
            Map::Gather(cut) => Collective::AllGather { parts: cut.clone() },
            Map::Scatter(cut) => Collective::ReduceScatter { parts: cut.clone() },
            Map::Exchange { split, concat } => Collective::AllToAll { split: split.clone(), concat: concat.clone() },
        };
        group.start_new(what, tensor)?.wait()
    }
}

/// A map forward and another backward.
struct Pair {
    group: Group,
    forward: Map,
    backward: Map,
}

impl Function for Pair {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        // A rank whose result does not reach the loss still takes part backward.
        context.set_materialize_grads(true);
        Ok(vec![self.forward.apply(&self.group, &inputs[0])?])
    }

    fn backward(
        &mut self,
        _context: &mut Context,
        grad_outputs: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let grads = grad_outputs.into_iter().flatten().map(|grad| self.backward.apply(&self.group, &grad));
        Ok(vec![grads.last().transpose()?])
    }
}

/// # Differentiable collectives
///
/// Each stands in the autograd graph with the backward that its line says; gradients are summed, never averaged. Errors
/// of a backward collective end the backward pass. On a group of size 1 each returns its input itself.
///
/// | form | forward | backward | use |
/// |---|---|---|---|
/// | [`all_gather_autograd`](Group::all_gather_autograd) | all-gather | reduce-scatter | ranks use the whole differently |
/// | [`gather_autograd`](Group::gather_autograd) | all-gather | own slice | all ranks do the same with the whole |
/// | [`reduce_scatter_autograd`](Group::reduce_scatter_autograd) | reduce-scatter | all-gather | partial sums to shards |
/// | [`all_reduce_autograd`](Group::all_reduce_autograd) | sum | identity | partial sums, then the same on all ranks |
/// | [`copy_autograd`](Group::copy_autograd) | identity | sum | the same on all ranks, then used differently |
/// | [`shard_autograd`](Group::shard_autograd) | own slice | all-gather | the same on all ranks to shards |
/// | [`all_to_all_autograd`](Group::all_to_all_autograd) | all-to-all | the inverse | shards of one axis to another's |
///
/// Forms along an axis take the ranks' lengths along it if they differ, and `None` if they are equal.
impl Group {
    /// All-gather along `axis` whose backward sums the ranks' gradients and scatters them: for a whole that each rank
    /// uses in its own way.
    pub fn all_gather_autograd(&self, tensor: &Tensor, axis: usize, sizes: Option<&[usize]>) -> Result<Tensor> {
        let cut = self.gathered_cut(tensor, axis, sizes)?;
        self.differentiable(tensor, Map::Gather(cut.clone()), Map::Scatter(cut))
    }

    /// All-gather along `axis` whose backward takes this rank's slice of the gradient: for a whole that all ranks use in
    /// the same way, so that their gradients are equal.
    pub fn gather_autograd(&self, tensor: &Tensor, axis: usize, sizes: Option<&[usize]>) -> Result<Tensor> {
        let cut = self.gathered_cut(tensor, axis, sizes)?;
        self.differentiable(tensor, Map::Gather(cut.clone()), Map::Own(cut))
    }

    /// Reduce-scatter along `axis` whose backward gathers.
    pub fn reduce_scatter_autograd(&self, tensor: &Tensor, axis: usize, sizes: Option<&[usize]>) -> Result<Tensor> {
        let cut = self.scattered_cut(Op::ReduceScatter, tensor, axis, sizes)?;
        self.differentiable(tensor, Map::Scatter(cut.clone()), Map::Gather(cut))
    }

    /// The sum over all ranks, whose backward passes the gradient on: for partial sums whose total all ranks use in the
    /// same way.
    pub fn all_reduce_autograd(&self, tensor: &Tensor) -> Result<Tensor> {
        self.differentiable(tensor, Map::Sum, Map::Identity)
    }

    /// The tensor itself, whose gradient is summed over all ranks: for a tensor that is equal on all ranks and that each
    /// uses in its own way.
    pub fn copy_autograd(&self, tensor: &Tensor) -> Result<Tensor> {
        self.differentiable(tensor, Map::Identity, Map::Sum)
    }

    /// This rank's slice along `axis` of a tensor that is equal on all ranks; backward gathers the slices' gradients.
    pub fn shard_autograd(&self, tensor: &Tensor, axis: usize, sizes: Option<&[usize]>) -> Result<Tensor> {
        let cut = self.scattered_cut(Op::AllGather, tensor, axis, sizes)?;
        self.differentiable(tensor, Map::Own(cut.clone()), Map::Gather(cut))
    }

    /// [`Group::all_to_all`], or with `sizes` = (`split_sizes`, `concat_sizes`) [`Group::all_to_all_uneven`], whose
    /// backward is the inverse exchange.
    pub fn all_to_all_autograd(
        &self,
        tensor: &Tensor,
        split_axis: usize,
        concat_axis: usize,
        sizes: Option<(&[usize], &[usize])>,
    ) -> Result<Tensor> {
        let (split, concat) = self.exchange_cuts(&tensor.size(), split_axis, concat_axis, sizes)?;
        let inverse = Map::Exchange { split: concat.clone(), concat: split.clone() };
        self.differentiable(tensor, Map::Exchange { split, concat }, inverse)
    }

    fn gathered_cut(&self, tensor: &Tensor, axis: usize, sizes: Option<&[usize]>) -> Result<Cut> {
        let shape = tensor.size();
        match sizes {
            Some(sizes) => self.own_cut(Op::AllGather, &shape, axis, sizes),
            None => Ok(Cut { axis, sizes: vec![self.axis_length(Op::AllGather, &shape, axis)?; self.size()] }),
        }
    }

    fn scattered_cut(&self, op: Op, tensor: &Tensor, axis: usize, sizes: Option<&[usize]>) -> Result<Cut> {
        match sizes {
            Some(sizes) => self.whole_cut(op, &tensor.size(), axis, sizes),
            None => self.even_cut(op, &tensor.size(), axis),
        }
    }

    fn differentiable(&self, tensor: &Tensor, forward: Map, backward: Map) -> Result<Tensor> {
        if self.is_single() {
            return Ok(tensor.shallow_clone());
        }
        let op = forward.op();
        let outputs = autograd::apply(Pair { group: self.clone(), forward, backward }, &[tensor]);
        let outputs = outputs.map_err(|error| match error {
            // An error of the collective comes through as itself.
            ferrotitan_ext::Error::Callback { source } => match source.downcast::<Error>() {
                Ok(own) => *own,
                Err(other) => self.members().backend(op, other),
            },
            other => self.members().backend(op, other),
        })?;
        outputs.into_iter().next().ok_or_else(|| self.members().backend(op, "the function gave no output"))
    }
}
