//! The header of a safetensors file.

use std::collections::HashMap;

use safetensors::tensor::{Metadata, TensorInfo as Entry};

use crate::{Error, Result, TensorInfo};

/// What stands before the tensors in a file that holds these, in this order and without gaps. Its length is a multiple
/// of 8. Tensors with larger elements should come first, so that all are aligned.
///
/// # Errors
/// [`Error::Item`] for a name that such a file cannot hold, or twice the same.
pub(crate) fn header(tensors: &[(String, TensorInfo)]) -> Result<Vec<u8>> {
    let mut entries = Vec::with_capacity(tensors.len());
    let mut start = 0;
    for (name, info) in tensors {
        let bad = |reason: &str| Error::Item { tensor: name.clone(), reason: reason.to_owned() };
        if name == "__metadata__" {
            return Err(bad("safetensors keeps this name for itself"));
        }
        let bytes = info.bytes().ok_or_else(|| bad("it has more bytes than can be"))?;
        let end = start + bytes;
        let entry = Entry { dtype: info.dtype.safetensors(), shape: info.shape.clone(), data_offsets: (start, end) };
        entries.push((name.clone(), entry));
        start = end;
    }
    // One key only: the order of several would differ from run to run. This one some readers insist on.
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let refused = |reason: String| Error::Unsupported { what: "this set of tensors".to_owned(), reason };
    let metadata = Metadata::new(Some(about), entries).map_err(|error| refused(error.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| refused(error.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}
