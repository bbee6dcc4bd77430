//! A batch cut into microbatches.

use ferrotitan_nn::{Batch, Documents};
use tch::Tensor;

use crate::error::Context as _;
use crate::{Error, Result};

/// Cuts a batch into `count` microbatches of equally many sequences, in order. They share the batch's storage.
///
/// # Errors
/// [`Error::Indivisible`] when `count` does not divide the number of sequences; when the batch's tensors differ in it.
pub fn microbatches(batch: &Batch, count: usize) -> Result<Vec<Batch>> {
    let rows = batch.tokens.size().first().map_or(0, |&rows| rows as usize);
    if count == 0 || !rows.is_multiple_of(count) || rows == 0 {
        return Err(Error::Indivisible { rows, microbatches: count });
    }
    let each = rows / count;
    let cut = |tensor: &Tensor, at: usize| tensor.f_narrow(0, (at * each) as i64, each as i64).context("microbatches");
    let microbatch = |at: usize| -> Result<Batch> {
        let documents = match &batch.documents {
            Some(documents) if documents.lengths().len() == rows => {
                Some(Documents::from_lengths(documents.lengths()[at * each..][..each].to_vec())?)
            }
            // Left to the attention, which says what is wrong.
            other => other.clone(),
        };
        Ok(Batch {
            tokens: cut(&batch.tokens, at)?,
            labels: batch.labels.as_ref().map(|labels| cut(labels, at)).transpose()?,
            positions: cut(&batch.positions, at)?,
            documents,
        })
    };
    (0..count).map(microbatch).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn batch(rows: i64) -> Batch {
        let tokens = Tensor::arange(rows * 4, (Kind::Int64, Device::Cpu)).view([rows, 4]);
        let documents = Documents::from_lengths((0..rows).map(|row| vec![row % 3 + 1, 3 - row % 3]).collect());
        let mut batch = Batch::new(tokens.shallow_clone(), Some(tokens + 1)).unwrap();
        batch.documents = Some(documents.unwrap());
        batch
    }

    #[test]
    fn rows_stay_in_order_with_all_that_belongs_to_them() {
        let whole = batch(6);
        for count in [1, 2, 3, 6] {
            let parts = microbatches(&whole, count).unwrap();
            assert_eq!(parts.len(), count);
            let join = |of: &dyn Fn(&Batch) -> Tensor| Tensor::cat(&parts.iter().map(of).collect::<Vec<_>>(), 0);
            assert_eq!(join(&|part| part.tokens.shallow_clone()), whole.tokens);
            assert_eq!(join(&|part| part.labels.as_ref().unwrap().shallow_clone()), *whole.labels.as_ref().unwrap());
            assert_eq!(join(&|part| part.positions.shallow_clone()), whole.positions);
            let lengths = parts.iter().flat_map(|part| part.documents.as_ref().unwrap().lengths().to_vec());
            assert_eq!(lengths.collect::<Vec<_>>(), whole.documents.as_ref().unwrap().lengths());
        }
    }

    #[test]
    fn a_number_that_does_not_divide_the_batch_is_refused() {
        for count in [0, 4, 7] {
            let message = microbatches(&batch(6), count).unwrap_err().to_string();
            assert!(message.contains("6 sequences") && message.contains(&format!("into {count}")), "{message}");
        }
    }
}
