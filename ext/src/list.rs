//! Lists of tensors on their way in and out of the shim.

use tch::Tensor;
use torch_sys::C_tensor;

use crate::ffi::{self, RawList};

/// An owned `std::vector<at::Tensor>`.
pub(crate) struct TensorList(*mut RawList);

impl TensorList {
    pub(crate) fn new() -> Self {
        // SAFETY: no preconditions.
        Self(unsafe { ffi::ft_list_new() })
    }

    pub(crate) fn of<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Self {
        Self::of_optional(tensors.into_iter().map(Some))
    }

    pub(crate) fn of_optional<'a>(tensors: impl IntoIterator<Item = Option<&'a Tensor>>) -> Self {
        let list = Self::new();
        for tensor in tensors {
            // SAFETY: `list` is live and ours alone.
            unsafe { push(list.0, tensor) };
        }
        list
    }

    pub(crate) fn as_ptr(&self) -> *const RawList {
        self.0
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut RawList {
        self.0
    }

    pub(crate) fn tensors(&self) -> Vec<Option<Tensor>> {
        // SAFETY: the list is live.
        unsafe { tensors(self.0) }
    }
}

impl Drop for TensorList {
    fn drop(&mut self) {
        // SAFETY: ours alone, freed once.
        unsafe { ffi::ft_list_free(self.0) };
    }
}

/// Appends to a list; `None` as an undefined tensor.
///
/// # Safety
/// `list` is live and nobody else uses it meanwhile.
pub(crate) unsafe fn push(list: *mut RawList, tensor: Option<&Tensor>) {
    let pointer = tensor.map_or(std::ptr::null(), Tensor::as_ptr);
    // SAFETY: the caller answers for `list`; the shim copies the handle, so the tensor need only live for the call.
    unsafe { ffi::ft_list_push(list, pointer) };
}

/// Handles of a list's tensors; `None` for undefined ones.
///
/// # Safety
/// `list` is live and nobody changes it meanwhile.
pub(crate) unsafe fn tensors(list: *const RawList) -> Vec<Option<Tensor>> {
    // SAFETY: the caller answers for `list`, and the index is in range.
    unsafe { (0..ffi::ft_list_len(list)).map(|index| owned(ffi::ft_list_get(list, index))).collect() }
}

/// A tensor from an owned handle of the shim; `None` for null.
///
/// # Safety
/// `pointer` is null or a handle that nobody else frees.
pub(crate) unsafe fn owned(pointer: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: the caller gives the handle away.
    (!pointer.is_null()).then(|| unsafe { Tensor::from_ptr(pointer) })
}
