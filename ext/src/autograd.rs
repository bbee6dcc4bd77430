//! Autograd functions written in Rust, and the backward pass from several roots.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::marker::PhantomData;

use tch::Tensor;

use crate::callback;
use crate::ffi::{self, RawContext, RawList, RawSink};
use crate::list::{self, TensorList};
use crate::{BoxError, Error, Result};

/// A differentiable function of tensors. What it needs besides tensors lives in the struct.
///
/// It runs once forward; its backward runs once for each backward pass through the node it made, on the thread that
/// started the pass (CPU) or the device's (CUDA). The struct is dropped with the node.
pub trait Function: Send + 'static {
    /// Computes the outputs, with gradient tracking off.
    ///
    /// Outputs that are not floating point do not get gradients. Tensors that the backward needs go to
    /// [`Context::save`]; one kept in the struct instead escapes the check for in-place changes, and, when it is an
    /// output, keeps the graph alive forever.
    ///
    /// # Errors
    /// Any error, which [`apply`] returns as [`Error::Callback`].
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError>;

    /// Computes the gradients of the inputs, one for each input, from those of the outputs.
    ///
    /// `None` among `grad_outputs` is an output that nothing used; `None` in the result is a gradient of zero, or of an
    /// input that needs none ([`Context::needs_input_grad`]). Gradient tracking is off unless the pass was asked for a
    /// graph of its own. A backward pass may be started in here.
    ///
    /// # Errors
    /// Any error, which ends the backward pass; [`backward`] returns it as [`Error::Callback`].
    fn backward(
        &mut self,
        context: &mut Context,
        grad_outputs: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError>;
}

/// What a [`Function`] sees of its node.
pub struct Context {
    raw: *mut RawContext,
    /// The node is not another thread's to touch.
    _not_send: PhantomData<*mut ()>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context {
    /// Keeps tensors for the backward, after those saved before. Only in `forward`; in `backward` it does nothing.
    ///
    /// An in-place change between here and the backward pass makes [`Self::saved`] fail, as with libtorch's own
    /// functions.
    pub fn save(&mut self, tensors: &[Tensor]) {
        for tensor in tensors {
            // SAFETY: the context lives as long as the callback that borrows `self`; the shim copies the handle.
            unsafe { ffi::ft_context_save(self.raw, tensor.as_ptr()) };
        }
    }

    /// The saved tensors, in order. Only in `backward`.
    ///
    /// # Errors
    /// [`Error::Torch`] when one of them was changed in place, or when the graph was freed by an earlier pass without
    /// `retain_graph`, or in `forward`.
    pub fn saved(&self) -> Result<Vec<Tensor>> {
        let mut list = TensorList::new();
        ffi::call("saved tensors", |failure| {
            // SAFETY: the context lives as long as the callback; the list is ours.
            unsafe { ffi::ft_context_saved(self.raw, list.as_mut_ptr(), failure) }
        })?;
        Ok(list.tensors().into_iter().map(|tensor| tensor.unwrap_or_else(Tensor::new)).collect())
    }

    /// Whether this pass wants the gradient of input `index`; false past the last input.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        // SAFETY: the context lives as long as the callback.
        unsafe { ffi::ft_context_needs_input_grad(self.raw, index) }
    }

    /// Says that an output has no gradient. Only in `forward`; outputs that are not floating point are marked already.
    pub fn mark_non_differentiable(&mut self, output: &Tensor) {
        // SAFETY: the context lives as long as the callback; the shim copies the handle.
        unsafe { ffi::ft_context_mark_non_differentiable(self.raw, output.as_ptr()) };
    }

    /// Whether `backward` gets zeros instead of `None` for unused outputs; at first it does not. Only in `forward`.
    pub fn set_materialize_grads(&mut self, value: bool) {
        // SAFETY: the context lives as long as the callback.
        unsafe { ffi::ft_context_set_materialize_grads(self.raw, value) };
    }
}

/// A function and how many inputs it had.
struct State {
    function: Box<dyn Function>,
    inputs: usize,
}

/// Runs a function and records it in the graph, when an input requires a gradient and tracking is on.
///
/// # Errors
/// [`Error::Callback`] with what `forward` returned, [`Error::Panicked`] when it panicked, [`Error::Torch`] when
/// libtorch refuses its outputs.
pub fn apply(function: impl Function, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let state = callback::into_state(State { function: Box::new(function), inputs: inputs.len() });
    let inputs = TensorList::of(inputs.iter().copied());
    let mut outputs = TensorList::new();
    ffi::call("autograd function", |failure| {
        // SAFETY: the shim takes over `state`, whatever the outcome, with the functions for its type; lists are live.
        unsafe {
            ffi::ft_function_apply(
                state,
                callback::drop_state::<State>,
                forward,
                backward_of_node,
                inputs.as_ptr(),
                outputs.as_mut_ptr(),
                failure,
            )
        }
    })?;
    Ok(outputs.tensors().into_iter().map(|tensor| tensor.unwrap_or_else(Tensor::new)).collect())
}

/// Called by the shim for [`Function::forward`].
///
/// # Safety
/// As the shim calls it: a live state of [`apply`], and pointers that live for the call.
unsafe extern "C" fn forward(
    state: *mut c_void,
    context: *mut RawContext,
    inputs: *const RawList,
    outputs: *mut RawList,
    sink: *mut RawSink,
) -> c_int {
    let body = |state: &mut State| {
        // SAFETY: the shim's list lives for the call.
        let inputs: Vec<Tensor> =
            unsafe { list::tensors(inputs) }.into_iter().map(|tensor| tensor.unwrap_or_else(Tensor::new)).collect();
        let mut context = Context { raw: context, _not_send: PhantomData };
        for output in state.function.forward(&mut context, &inputs)? {
            // SAFETY: the shim's list is ours for the call.
            unsafe { list::push(outputs, Some(&output)) };
        }
        Ok(())
    };
    // SAFETY: passed on from the shim.
    unsafe { callback::run(state, sink, body) }
}

/// Called by the shim for [`Function::backward`].
///
/// # Safety
/// As [`forward`].
unsafe extern "C" fn backward_of_node(
    state: *mut c_void,
    context: *mut RawContext,
    inputs: *const RawList,
    outputs: *mut RawList,
    sink: *mut RawSink,
) -> c_int {
    let body = |state: &mut State| {
        // SAFETY: the shim's list lives for the call.
        let grad_outputs = unsafe { list::tensors(inputs) };
        let mut context = Context { raw: context, _not_send: PhantomData };
        let grads = state.function.backward(&mut context, grad_outputs)?;
        if grads.len() != state.inputs {
            let message = format!("backward gave {} gradients for {} inputs", grads.len(), state.inputs);
            return Err(Error::argument("autograd function", message).into());
        }
        for grad in &grads {
            // SAFETY: the shim's list is ours for the call.
            unsafe { list::push(outputs, grad.as_ref()) };
        }
        Ok(())
    };
    // SAFETY: passed on from the shim.
    unsafe { callback::run(state, sink, body) }
}

/// Accumulates into every leaf the gradient of all `outputs` together.
///
/// `grads` has one gradient for each output, where `None` stands for 1 and needs an output of one element; or is empty,
/// for all `None`. The graph is freed unless `retain_graph`.
///
/// # Errors
/// [`Error::Callback`] with the error of a [`Function`] or hook, [`Error::Panicked`] when one panicked,
/// [`Error::Torch`] when libtorch fails. Leaves may have been given part of their gradients by then.
pub fn backward(outputs: &[Tensor], grads: &[Option<Tensor>], retain_graph: bool) -> Result<()> {
    const OP: &str = "backward";
    check_grads(OP, outputs, grads)?;
    let outputs = TensorList::of(outputs);
    let grads = TensorList::of_optional(grads.iter().map(Option::as_ref));
    ffi::call(OP, |failure| {
        // SAFETY: both lists are live.
        unsafe { ffi::ft_backward(outputs.as_ptr(), grads.as_ptr(), retain_graph, failure) }
    })
}

/// The gradients of all `outputs` together with respect to `inputs`, accumulating nothing; `None` for an input that
/// does not take part.
///
/// `grad_outputs` as in [`backward`]. With `create_graph` the gradients can be differentiated in their turn.
///
/// # Errors
/// See [`backward`].
pub fn grad(
    outputs: &[Tensor],
    inputs: &[Tensor],
    grad_outputs: &[Option<Tensor>],
    retain_graph: bool,
    create_graph: bool,
) -> Result<Vec<Option<Tensor>>> {
    const OP: &str = "grad";
    check_grads(OP, outputs, grad_outputs)?;
    let outputs = TensorList::of(outputs);
    let inputs = TensorList::of(inputs);
    let grad_outputs = TensorList::of_optional(grad_outputs.iter().map(Option::as_ref));
    let mut grads = TensorList::new();
    ffi::call(OP, |failure| {
        // SAFETY: all lists are live.
        unsafe {
            ffi::ft_grad(
                outputs.as_ptr(),
                inputs.as_ptr(),
                grad_outputs.as_ptr(),
                retain_graph,
                create_graph,
                grads.as_mut_ptr(),
                failure,
            )
        }
    })?;
    Ok(grads.tensors())
}

fn check_grads(op: &'static str, outputs: &[Tensor], grads: &[Option<Tensor>]) -> Result<()> {
    if grads.is_empty() || grads.len() == outputs.len() {
        return Ok(());
    }
    let message = format!("{} gradients for {} outputs; give one for each, or none", grads.len(), outputs.len());
    Err(Error::argument(op, message))
}

/// Whether gradients are tracked on this thread.
pub fn is_grad_enabled() -> bool {
    // SAFETY: reads a thread-local flag.
    unsafe { ffi::ft_grad_mode_enabled() }
}

/// Sets the gradient of a leaf, of its shape, dtype and device; `None` drops it, and the next pass starts a new one.
///
/// # Errors
/// [`Error::Torch`] when the tensor is no leaf or the gradient does not fit.
pub fn set_gradient(tensor: &Tensor, gradient: Option<&Tensor>) -> Result<()> {
    let gradient = gradient.map_or(std::ptr::null(), Tensor::as_ptr);
    // SAFETY: the tensor is live, and the gradient is or null; the shim copies the handle.
    ffi::call("set gradient", |failure| unsafe { ffi::ft_set_gradient(tensor.as_ptr(), gradient, failure) })
}

/// Runs `body` with gradient tracking on or off on this thread, and restores it also after a panic.
pub fn with_grad_mode<R>(enabled: bool, body: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: sets a flag of this thread.
            unsafe { ffi::ft_grad_mode(self.0) };
        }
    }
    // SAFETY: as above.
    let _restore = Restore(unsafe { ffi::ft_grad_mode(enabled) });
    body()
}
