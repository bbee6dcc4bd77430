//! The fused AdamW kernel, for a list of parameters at once.

use tch::{Device, Kind, Tensor};

use crate::ffi;
use crate::list::TensorList;
use crate::{Error, Result};

/// Constants of one AdamW step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamwStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; multiplies the learning rate.
    pub weight_decay: f64,
    /// Whether to ascend.
    pub maximize: bool,
}

/// One AdamW step (Loshchilov and Hutter, 2019) in place, over parameters of one device and dtype:
///
/// p ← p·(1 - lr·weight_decay) - lr·m̂ / (√v̂ + eps), where m̂ = m / (1 - beta1ᵗ) and v̂ = v / (1 - beta2ᵗ).
///
/// `grads`, `exp_avgs` (m) and `exp_avg_sqs` (v) have the shapes and the dtype of `params`. `state_steps` are `Float`
/// tensors of one element with t, the number of this step: the caller adds 1 to each before the call. Parameters may be
/// leaves that require gradients.
///
/// # Errors
/// [`Error::Argument`] when the lists do not have the same lengths and shapes; [`Error::Torch`] when libtorch has no
/// kernel for the device or dtype.
pub fn fused_adamw(
    step: &AdamwStep,
    params: &[Tensor],
    grads: &[Tensor],
    exp_avgs: &[Tensor],
    exp_avg_sqs: &[Tensor],
    state_steps: &[Tensor],
) -> Result<()> {
    const OP: &str = "fused_adamw";
    for (name, list) in [("grads", grads), ("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)] {
        check_like(OP, name, list, params)?;
    }
    check_steps(OP, state_steps, params.len())?;
    // The CPU kernel divides its work by the number of elements.
    let kept: Vec<usize> = (0..params.len()).filter(|&index| params[index].numel() > 0).collect();
    if kept.is_empty() {
        return Ok(());
    }
    let list = |tensors: &[Tensor]| TensorList::of(kept.iter().map(|&index| &tensors[index]));
    let (params, grads) = (list(params), list(grads));
    let (exp_avgs, exp_avg_sqs, state_steps) = (list(exp_avgs), list(exp_avg_sqs), list(state_steps));
    ffi::call(OP, |failure| {
        // SAFETY: all lists are live, and were checked to match, which the kernel relies on.
        unsafe {
            ffi::ft_fused_adamw(
                params.as_ptr(),
                grads.as_ptr(),
                exp_avgs.as_ptr(),
                exp_avg_sqs.as_ptr(),
                state_steps.as_ptr(),
                step.lr,
                step.beta1,
                step.beta2,
                step.weight_decay,
                step.eps,
                step.maximize,
                failure,
            )
        }
    })
}

/// The kernels trust their lists to match, so this crate looks first.
fn check_like(op: &'static str, name: &str, list: &[Tensor], params: &[Tensor]) -> Result<()> {
    if list.len() != params.len() {
        let message = format!("{} {name} for {} params; give one for each", list.len(), params.len());
        return Err(Error::argument(op, message));
    }
    for (index, (tensor, param)) in list.iter().zip(params).enumerate() {
        let (tensor, param) = (description(tensor), description(param));
        if tensor.is_none() || tensor != param {
            let message =
                format!("{name}[{index}] is {tensor:?} and its parameter {param:?}; both must be contiguous and alike");
            return Err(Error::argument(op, message));
        }
    }
    Ok(())
}

/// What the kernels need to be the same; `None` for a tensor that is undefined or not contiguous.
fn description(tensor: &Tensor) -> Option<(Kind, Vec<i64>, Device)> {
    let fits = tensor.defined() && tensor.is_contiguous();
    fits.then(|| Some((tensor.f_kind().ok()?, tensor.size(), tensor.device()))).flatten()
}

fn check_steps(op: &'static str, steps: &[Tensor], params: usize) -> Result<()> {
    if steps.len() != params {
        let message = format!("{} state_steps for {params} params; give one for each", steps.len());
        return Err(Error::argument(op, message));
    }
    match steps
        .iter()
        .position(|step| !step.defined() || step.numel() != 1 || !matches!(step.f_kind(), Ok(Kind::Float)))
    {
        None => Ok(()),
        Some(index) => Err(Error::argument(op, format!("state_steps[{index}] must be one element of kind Float"))),
    }
}
