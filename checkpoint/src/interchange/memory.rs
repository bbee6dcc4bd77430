//! Tensors in memory.

use std::collections::BTreeMap;

use ferrotitan_ext::storage;
use ferrotitan_mesh::Region;
use tch::Tensor;

use crate::{Dtype, Error, Result, Source, TensorInfo};

/// Whole tensors in memory, as a [`Source`].
#[derive(Debug, Default)]
pub struct Memory {
    infos: BTreeMap<String, TensorInfo>,
    bytes: BTreeMap<String, Vec<u8>>,
}

impl Memory {
    /// Without tensors.
    #[must_use]
    pub fn new() -> Self {
        Memory::default()
    }

    /// Copies a tensor, of any device and strides, in place of one that has this name.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a dtype that safetensors lacks; [`Error::Torch`].
    pub fn insert(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let shape = tensor.size().into_iter().map(|length| length as usize).collect();
        let info = TensorInfo { shape, dtype: Dtype::of(tensor.f_kind()?)? };
        self.bytes.insert(name.to_owned(), storage::to_bytes(&tensor.f_detach()?)?);
        self.infos.insert(name.to_owned(), info);
        Ok(())
    }
}

impl Source for Memory {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.infos
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.check(name, region, out)?;
        let bytes = self.bytes.get(name).ok_or_else(|| Error::NoTensor { tensor: name.to_owned() })?;
        let (size, mut rest) = (info.dtype.size(), out);
        for (start, length) in region.runs_in(&Region::whole(&info.shape)) {
            let (now, later) = rest.split_at_mut(length * size);
            now.copy_from_slice(&bytes[start * size..(start + length) * size]);
            rest = later;
        }
        Ok(())
    }
}
