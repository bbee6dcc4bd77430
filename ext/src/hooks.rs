//! Hooks on gradients: before one flows on, and once one has been accumulated.

use std::ffi::{c_int, c_void};
use std::fmt;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::callback;
use crate::ffi::{self, RawSink};
use crate::{BoxError, Result};

/// Which hook of which tensor. Dropping it leaves the hook in place; it goes with the tensor's graph.
pub struct HookHandle {
    tensor: Tensor,
    index: u32,
}

impl fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookHandle").field("index", &self.index).finish_non_exhaustive()
    }
}

impl HookHandle {
    /// Removes the hook.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when libtorch refuses.
    pub fn remove(self) -> Result<()> {
        ffi::call("remove hook", |failure| {
            // SAFETY: the tensor is live and the index is one that it gave.
            unsafe { ffi::ft_hook_gradient_remove(self.tensor.as_ptr(), self.index, failure) }
        })
    }
}

type Gradient = Box<dyn FnMut(&Tensor) -> Result<Option<Tensor>, BoxError> + Send>;
type Accumulated = Box<dyn FnMut(&Tensor) -> Result<(), BoxError> + Send>;

/// Runs `hook` in every backward pass with the gradient of `tensor`, once that is complete; what it returns takes the
/// gradient's place. Several hooks run in the order they were set.
///
/// For a tensor that is no leaf the hook belongs to the node that made it. A hook that holds the tensor keeps both
/// alive forever.
///
/// # Errors
/// [`crate::Error::Torch`] when the tensor requires no gradient. An error of the hook ends the backward pass, which
/// returns it.
pub fn on_gradient(
    tensor: &Tensor,
    hook: impl FnMut(&Tensor) -> Result<Option<Tensor>, BoxError> + Send + 'static,
) -> Result<HookHandle> {
    let state = callback::into_state::<Gradient>(Box::new(hook));
    let mut index = 0;
    ffi::call("gradient hook", |failure| {
        // SAFETY: the tensor is live; the shim takes over `state`, whatever the outcome, with the functions for it.
        unsafe {
            ffi::ft_hook_gradient(
                tensor.as_ptr(),
                state,
                callback::drop_state::<Gradient>,
                gradient,
                &raw mut index,
                failure,
            )
        }
    })?;
    Ok(HookHandle { tensor: tensor.shallow_clone(), index })
}

/// Called by the shim.
///
/// # Safety
/// As the shim calls it: a live state of [`on_gradient`], and pointers that live for the call.
unsafe extern "C" fn gradient(
    state: *mut c_void,
    tensor: *const C_tensor,
    output: *mut *mut C_tensor,
    sink: *mut RawSink,
) -> c_int {
    let body = |hook: &mut Gradient| {
        // SAFETY: `tensor` lives for the call, and `borrowed` makes a handle of its own.
        if let Some(changed) = hook(&unsafe { borrowed(tensor) })? {
            let mut list = crate::list::TensorList::of([&changed]);
            // SAFETY: the list has one tensor, of which the shim gets a handle of its own.
            unsafe { *output = ffi::ft_list_get(list.as_mut_ptr(), 0) };
        }
        Ok(())
    };
    // SAFETY: passed on from the shim.
    unsafe { callback::run(state, sink, body) }
}

/// Runs `hook` in every backward pass with the leaf `tensor`, once its gradient has been accumulated into
/// `tensor.grad()`. Takes the place of such a hook set before.
///
/// A hook that holds the tensor keeps it alive forever; it is given it instead.
///
/// # Errors
/// [`crate::Error::Torch`] when the tensor is no leaf that requires a gradient. An error of the hook ends the backward
/// pass, which returns it.
pub fn on_gradient_accumulated(
    tensor: &Tensor,
    hook: impl FnMut(&Tensor) -> Result<(), BoxError> + Send + 'static,
) -> Result<()> {
    let state = callback::into_state::<Accumulated>(Box::new(hook));
    ffi::call("accumulated-gradient hook", |failure| {
        // SAFETY: the tensor is live; the shim takes over `state`, whatever the outcome, with the functions for it.
        unsafe {
            ffi::ft_hook_accumulated(tensor.as_ptr(), state, callback::drop_state::<Accumulated>, accumulated, failure)
        }
    })
}

/// Called by the shim.
///
/// # Safety
/// As the shim calls it: a live state of [`on_gradient_accumulated`], and pointers that live for the call.
unsafe extern "C" fn accumulated(
    state: *mut c_void,
    tensor: *const C_tensor,
    _output: *mut *mut C_tensor,
    sink: *mut RawSink,
) -> c_int {
    // SAFETY: `tensor` lives for the call, and `borrowed` makes a handle of its own.
    let body = |hook: &mut Accumulated| hook(&unsafe { borrowed(tensor) });
    // SAFETY: passed on from the shim.
    unsafe { callback::run(state, sink, body) }
}

/// Removes the hook that [`on_gradient_accumulated`] set, if there is one.
///
/// # Errors
/// [`crate::Error::Torch`] when the tensor is no leaf that requires a gradient.
pub fn clear_gradient_accumulated(tensor: &Tensor) -> Result<()> {
    // SAFETY: the tensor is live.
    ffi::call("accumulated-gradient hook", |failure| unsafe {
        ffi::ft_hook_accumulated_clear(tensor.as_ptr(), failure)
    })
}

/// A handle of a tensor that C++ lends.
///
/// # Safety
/// `tensor` is a live handle.
unsafe fn borrowed(tensor: *const C_tensor) -> Tensor {
    // SAFETY: the caller answers for the handle, which is only read.
    unsafe { Tensor::clone_from_ptr(tensor.cast_mut()) }
}
