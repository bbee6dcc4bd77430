//! Gradients of parameters that stages of several ranks hold.

use ferrotitan_comm::Group;
use ferrotitan_nn::Parameter;
use tch::Tensor;

use crate::Result;
use crate::error::Context as _;

/// Gives each parameter that several ranks of `group` hold the sum of their gradients, in the same order of addition on
/// all, so that the copies stay equal to the bit. Only the holders exchange anything.
pub(crate) fn sum_gradients(group: &Group, parameters: &[Parameter]) -> Result<()> {
    let mut shared: Vec<(Vec<usize>, &Parameter)> =
        parameters.iter().map(|parameter| (parameter.layout().stages().to_vec(), parameter)).collect();
    shared.retain(|(holders, parameter)| holders.len() > 1 && parameter.is_trainable());
    // One order on all ranks, whose layers may come in different ones.
    shared.sort_by_key(|(_, parameter)| parameter.name().to_owned());
    shared.into_iter().try_for_each(|(holders, parameter)| sum(group, &holders, parameter))
}

fn sum(group: &Group, holders: &[usize], parameter: &Parameter) -> Result<()> {
    const STEP: &str = "summing the gradient of a tied parameter";
    let local = parameter.local()?;
    let own = match parameter.gradient()? {
        Some(gradient) => gradient.f_to_device(group.device()).and_then(|gradient| gradient.f_contiguous()),
        None => Tensor::f_zeros(local.size(), (local.kind(), group.device())),
    };
    let own = own.context(STEP)?;
    let mut sent = Vec::new();
    let mut arriving = Vec::new();
    let mut others: Vec<usize> = holders.iter().copied().filter(|&rank| rank != group.rank()).collect();
    others.sort_unstable();
    for other in others {
        // Two ranks take their two transfers in the same order.
        if group.rank() < other {
            sent.push(group.send_start(&own, other)?);
        }
        arriving.push((other, group.recv_start(&own.size(), own.kind(), other)?));
        if group.rank() > other {
            sent.push(group.send_start(&own, other)?);
        }
    }
    let mut parts = vec![(group.rank(), own)];
    for (other, pending) in arriving {
        parts.push((other, pending.wait()?));
    }
    for pending in sent {
        pending.wait()?;
    }
    parts.sort_by_key(|(rank, _)| *rank);
    let sum = tch::no_grad(|| {
        let mut parts = parts.into_iter().map(|(_, part)| Ok(part));
        let first = parts.next().unwrap_or_else(|| local.f_zeros_like());
        parts.try_fold(first?, |sum, part| sum.f_add(&part?))?.f_to_device(local.device())
    });
    Ok(parameter.set_gradient(sum.context(STEP)?)?)
}
