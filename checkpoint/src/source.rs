//! Anything that global tensors can be read from.

use std::collections::BTreeMap;
use std::fmt::Debug;

use ferrotitan_mesh::Region;

use crate::{Dtype, Error, Result};

/// What a tensor is, without its values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorInfo {
    /// The global shape.
    pub shape: Vec<usize>,
    /// The type of its elements.
    pub dtype: Dtype,
}

impl TensorInfo {
    /// The bytes of a region of this shape; `None` when there are more than can be.
    pub fn bytes_of(&self, shape: &[usize]) -> Option<usize> {
        if shape.contains(&0) {
            return Some(0);
        }
        let bytes = shape.iter().try_fold(self.dtype.size(), |bytes, &length| bytes.checked_mul(length))?;
        isize::try_from(bytes).is_ok().then_some(bytes)
    }

    /// The bytes of all of it; `None` when there are more than can be.
    pub fn bytes(&self) -> Option<usize> {
        self.bytes_of(&self.shape)
    }
}

/// Named global tensors, any region of which can be read.
pub trait Source: Send + Sync + Debug {
    /// What there is.
    fn tensors(&self) -> &BTreeMap<String, TensorInfo>;

    /// Reads a region into `out`: row-major, in the tensor's dtype, little-endian, exactly its bytes.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::Region`], and whatever stands in the way of the bytes.
    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()>;

    /// What a tensor is, once it is clear that `region` is a part of it and that `out` is as long as that part.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::Region`].
    fn check(&self, name: &str, region: &Region, out: &[u8]) -> Result<&TensorInfo> {
        let info = self.tensors().get(name).ok_or_else(|| Error::NoTensor { tensor: name.to_owned() })?;
        let inside = Region::whole(&info.shape).contains(region);
        if !inside || info.bytes_of(&region.shape) != Some(out.len()) {
            let (region, shape, bytes) = (region.clone(), info.shape.clone(), out.len());
            return Err(Error::Region { tensor: name.to_owned(), region, shape, bytes });
        }
        Ok(info)
    }
}
