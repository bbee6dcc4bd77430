//! Elements of one type as those of another.

use ferrotitan_ext::storage;
use tch::Tensor;

use crate::{Dtype, Result};

/// `bytes`, elements of type `from`, as elements of type `to`, rounded as libtorch rounds.
pub(super) fn cast<'a>(bytes: &'a [u8], from: Dtype, to: Dtype, converted: &'a mut Vec<u8>) -> Result<&'a [u8]> {
    if from == to {
        return Ok(bytes);
    }
    let tensor = tensor(bytes, from)?.f_to_kind(to.kind())?;
    converted.resize(bytes.len() / from.size() * to.size(), 0);
    storage::read(&tensor, converted)?;
    Ok(converted)
}

/// A flat tensor of these elements, a copy.
pub(super) fn tensor(bytes: &[u8], dtype: Dtype) -> Result<Tensor> {
    Ok(Tensor::f_from_data_size(bytes, &[(bytes.len() / dtype.size()) as i64], dtype.kind())?)
}
