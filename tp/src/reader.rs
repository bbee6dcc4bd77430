//! What completes the gradient of a parameter that several ranks hold.

use std::sync::Arc;

use ferrotitan_comm::{Group, ReduceOp};
use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_nn::{Error, Reader};
use tch::Tensor;

use crate::error::carried;

/// For a parameter that every rank of `group` holds and applies to a part of the tokens, or of the features.
pub(crate) fn summed(group: Group) -> Reader {
    Arc::new(move |weight| group.copy_autograd(&weight).map_err(carried("summing a gradient")))
}

/// For a parameter of which `copies` consecutive ranks of `group` hold the same part.
pub(crate) fn summed_over_copies(group: Group, copies: usize) -> Reader {
    Arc::new(move |weight| {
        let mut outputs = autograd::apply(Copies { group: group.clone(), copies }, &[&weight])?;
        outputs.pop().ok_or_else(|| Error::Config("a parameter's reader gave no output".into()))
    })
}

/// The identity, whose backward adds up the copies' gradients.
struct Copies {
    group: Group,
    copies: usize,
}

impl Function for Copies {
    fn forward(&mut self, _context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        Ok(vec![inputs[0].shallow_clone()])
    }

    fn backward(
        &mut self,
        context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(Some(gradient)) = upstream.into_iter().next() else { return Ok(vec![None]) };
        if !context.needs_input_grad(0) {
            return Ok(vec![None]);
        }
        // One sum over the whole group of a tensor with a place for each part: there is no group of the copies alone.
        // The zeros at the other places add nothing.
        let parts = (self.group.size() / self.copies) as i64;
        let part = (self.group.rank() / self.copies) as i64;
        let shape = [&[parts], &gradient.size()[..]].concat();
        let mut all = Tensor::f_zeros(&shape, (gradient.kind(), gradient.device()))?;
        all.f_select(0, part)?.f_copy_(&gradient)?;
        self.group.all_reduce_(&mut all, ReduceOp::Sum)?;
        Ok(vec![Some(all.f_select(0, part)?)])
    }
}
