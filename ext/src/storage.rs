//! The memory behind a tensor: given back and taken again under the same tensor, written without autograd's notice,
//! read and written as bytes.

use tch::{Device, Kind, Tensor};

use crate::ffi;
use crate::{Error, Result};

/// How many bytes of memory the storage of a tensor holds; 0 when it was released, or for a tensor without storage.
pub fn nbytes(tensor: &Tensor) -> usize {
    // SAFETY: the tensor is live.
    unsafe { ffi::ft_storage_nbytes(tensor.as_ptr()) }
}

/// Whether [`release`] took the memory away.
pub fn is_released(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is live.
    unsafe { ffi::ft_storage_released(tensor.as_ptr()) }
}

/// Gives the memory of the tensor's storage back, for all tensors that share it; nothing happens when it was given back
/// already. Shapes stay, and views can be made; reading or writing an element before [`refill`] is an error.
///
/// # Errors
/// [`Error::Torch`] when the storage is not libtorch's to free.
pub fn release(tensor: &Tensor) -> Result<()> {
    // SAFETY: the tensor is live; the shim makes libtorch refuse to give the pointer of a released storage.
    ffi::call("storage release", |failure| unsafe { ffi::ft_storage_release(tensor.as_ptr(), failure) })
}

/// Takes memory again for a released storage, as much as it had, with undefined content; nothing happens when it was
/// not released.
///
/// # Errors
/// [`Error::Torch`] when there is not enough memory.
pub fn refill(tensor: &Tensor) -> Result<()> {
    // SAFETY: the tensor is live.
    ffi::call("storage refill", |failure| unsafe { ffi::ft_storage_refill(tensor.as_ptr(), failure) })
}

/// Copies `source` into `destination`, of the same shape, unseen by autograd: no node, no version bump. For a parameter
/// that gets back the very values it had, so that saved tensors stay right.
///
/// # Errors
/// [`Error::Torch`] when the shapes differ.
pub fn overwrite(destination: &Tensor, source: &Tensor) -> Result<()> {
    ffi::call("overwrite", |failure| {
        // SAFETY: both tensors are live.
        unsafe { ffi::ft_overwrite(destination.as_ptr(), source.as_ptr(), failure) }
    })
}

/// Makes `destination` refer to the storage, shape and strides of `source`, while it stays the same node of the graph.
///
/// # Errors
/// [`Error::Torch`] when dtype or device do not allow it.
pub fn set_data(destination: &Tensor, source: &Tensor) -> Result<()> {
    ffi::call("set_data", |failure| {
        // SAFETY: both tensors are live.
        unsafe { ffi::ft_set_data(destination.as_ptr(), source.as_ptr(), failure) }
    })
}

/// How often the tensor's data were changed in place, so far as autograd knows.
pub fn version(tensor: &Tensor) -> u64 {
    // SAFETY: the tensor is live.
    unsafe { ffi::ft_version(tensor.as_ptr()) }
}

/// Whether two tensors have one storage, released or not.
pub fn shares_storage(left: &Tensor, right: &Tensor) -> bool {
    // SAFETY: both tensors are live.
    let (left, right) = unsafe { (ffi::ft_storage_id(left.as_ptr()), ffi::ft_storage_id(right.as_ptr())) };
    left != 0 && left == right
}

/// The elements of a tensor as bytes, in row-major order, in this machine's byte order. Copies from any device, strides
/// or dtype.
///
/// # Errors
/// [`Error::Torch`] when the tensor has no data.
pub fn to_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0; element_bytes("to_bytes", &tensor.size(), kind_of("to_bytes", tensor)?)?];
    read(tensor, &mut bytes)?;
    Ok(bytes)
}

/// A CPU tensor from bytes as [`to_bytes`] gives them.
///
/// # Errors
/// [`Error::Argument`] when the bytes are not as many as shape and dtype say; [`Error::Torch`] when libtorch cannot
/// make such a tensor.
pub fn from_bytes(bytes: &[u8], shape: &[i64], kind: Kind) -> Result<Tensor> {
    const OP: &str = "from_bytes";
    let expected = element_bytes(OP, shape, kind)?;
    if bytes.len() != expected {
        let message = format!("{} bytes for {kind:?}{shape:?}, which has {expected}", bytes.len());
        return Err(Error::argument(OP, message));
    }
    let tensor = Tensor::f_empty(shape, (kind, Device::Cpu))
        .map_err(|error| Error::Torch { op: OP, message: error.to_string() })?;
    write(&tensor, bytes)?;
    Ok(tensor)
}

/// Reads all elements of a tensor into `bytes`, as [`to_bytes`] does; allocates nothing for a contiguous CPU tensor.
///
/// # Errors
/// [`Error::Torch`] when the bytes are not as many as the tensor has, or when it has no data.
pub fn read(tensor: &Tensor, bytes: &mut [u8]) -> Result<()> {
    ffi::call("tensor read", |failure| {
        // SAFETY: the tensor is live; pointer and length are of a live slice that is ours alone.
        unsafe { ffi::ft_read(tensor.as_ptr(), bytes.as_mut_ptr(), bytes.len(), failure) }
    })
}

/// Writes all elements of a tensor, of any device and strides, from bytes as [`to_bytes`] gives them. Autograd sees it
/// as little as [`overwrite`].
///
/// # Errors
/// [`Error::Torch`] when the bytes are not as many as the tensor has, or when it has no data.
pub fn write(tensor: &Tensor, bytes: &[u8]) -> Result<()> {
    ffi::call("tensor write", |failure| {
        // SAFETY: the tensor is live; pointer and length are of a live slice.
        unsafe { ffi::ft_write(tensor.as_ptr(), bytes.as_ptr(), bytes.len(), failure) }
    })
}

fn kind_of(op: &'static str, tensor: &Tensor) -> Result<Kind> {
    tensor.f_kind().map_err(|error| Error::Torch { op, message: error.to_string() })
}

fn element_bytes(op: &'static str, shape: &[i64], kind: Kind) -> Result<usize> {
    shape
        .iter()
        .try_fold(kind.elt_size_in_bytes(), |bytes, &extent| bytes.checked_mul(usize::try_from(extent).ok()?))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| Error::argument(op, format!("the shape {shape:?} is negative or too large")))
}
