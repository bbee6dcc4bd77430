//! What is in a safetensors file, without reading it.

use std::collections::BTreeMap;

use safetensors::tensor::Metadata;

use crate::{Dtype, Error, Result, Store, TensorInfo};

/// Bytes that are read at once: more than the headers of most files.
const HEAD: u64 = 64 << 10;
/// The most bytes of a header, as the format itself has it.
const LIMIT: u64 = 100_000_000;

/// A tensor, and the byte of the file at which it begins.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) info: TensorInfo,
    pub(super) start: u64,
}

/// Reads the header. The tensors are known to fill the rest of the file, without gaps and overlaps.
pub(super) fn entries(store: &Store, path: &str) -> Result<BTreeMap<String, Entry>> {
    let damaged = |reason: String| Error::Damaged { object: store.name(path), reason };
    let size = store.size(path)?;
    let head = store.get_range(path, 0..size.min(HEAD))?;
    let Some((length, rest)) = head.split_first_chunk() else {
        return Err(damaged("it is too short for a safetensors file".to_owned()));
    };
    let length = u64::from_le_bytes(*length);
    if length > LIMIT.min(size - 8) {
        return Err(damaged(format!("its header would have {length} bytes")));
    }
    let start = 8 + length;
    let long;
    let header = match rest.get(..length as usize) {
        Some(header) => header,
        None => {
            long = store.get_range(path, 8..start)?;
            &long[..]
        }
    };
    let metadata: Metadata = serde_json::from_slice(header).map_err(|error| damaged(error.to_string()))?;
    if start + metadata.data_len() as u64 != size {
        let reason = format!("its header speaks of {} bytes, but {} follow", metadata.data_len(), size - start);
        return Err(damaged(reason));
    }
    let entries = metadata.tensors().into_iter().map(|(name, entry)| {
        let dtype: Dtype = entry.dtype.to_string().parse().map_err(Error::of_tensor(&name))?;
        let info = TensorInfo { shape: entry.shape.clone(), dtype };
        Ok((name, Entry { info, start: start + entry.data_offsets.0 as u64 }))
    });
    entries.collect()
}
