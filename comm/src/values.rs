//! Collectives of plain values: numbers, bytes, and whether all went well.

use tch::{Device, Tensor};

use crate::{BoxError, Error, Group, Op, ReduceOp, Result};

/// # Plain values
impl Group {
    /// Combines one number of each rank, in `f64`.
    pub fn all_reduce_scalar(&self, value: f64, reduce: ReduceOp) -> Result<f64> {
        Ok(self.all_reduce_scalars(&[value], reduce)?[0])
    }

    /// Combines several numbers of each rank with one collective, each by itself, in `f64`. All ranks give equally many.
    pub fn all_reduce_scalars(&self, values: &[f64], reduce: ReduceOp) -> Result<Vec<f64>> {
        if self.is_single() {
            return Ok(values.to_vec());
        }
        let refused = |error| self.members().backend(Op::AllReduce, error);
        let mut tensor = Tensor::f_from_slice(values).and_then(|t| t.f_to_device(self.device())).map_err(refused)?;
        self.all_reduce_(&mut tensor, reduce)?;
        let tensor = tensor.f_to_device(Device::Cpu).map_err(refused)?;
        Vec::<f64>::try_from(&tensor).map_err(refused)
    }

    /// Every rank's bytes, in rank order; each rank may give any number of them. Two collectives: lengths, contents.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.is_single() {
            return Ok(vec![bytes.to_vec()]);
        }
        let refused = |error| self.members().backend(Op::AllGather, error);
        let length = Tensor::f_from_slice(&[bytes.len() as i64]).and_then(|t| t.f_to_device(self.device()));
        let lengths = self.all_gather(&length.map_err(refused)?, 0)?.f_to_device(Device::Cpu).map_err(refused)?;
        let lengths: Vec<usize> =
            Vec::<i64>::try_from(&lengths).map_err(refused)?.into_iter().map(|length| length as usize).collect();
        let tensor = Tensor::f_from_slice(bytes).and_then(|t| t.f_to_device(self.device())).map_err(refused)?;
        let all = self.all_gather_uneven(&tensor, 0, &lengths)?.f_to_device(Device::Cpu).map_err(refused)?;
        let all = Vec::<u8>::try_from(&all).map_err(refused)?;
        let mut rest = all.as_slice();
        Ok(lengths
            .into_iter()
            .map(|length| {
                let (own, others) = rest.split_at(length.min(rest.len()));
                rest = others;
                own.to_vec()
            })
            .collect())
    }

    /// Agrees on whether a step that each rank takes by itself went well on all: every rank gets its own value, or
    /// every rank gets an error, so that none goes on to a collective where others are missing.
    ///
    /// # Errors
    /// [`Error::RankFailed`] with this rank's own error if it has one, else [`Error::PeerFailed`] with the words of the
    /// first rank that has.
    pub fn all_ok<T, E: Into<BoxError>>(&self, result: Result<T, E>) -> Result<T> {
        let rank = self.members().rank();
        let result = result.map_err(|error| Error::RankFailed { rank, source: error.into() });
        let told = match &result {
            Ok(_) => String::new(),
            Err(Error::RankFailed { source, .. }) => format!("!{source}"),
            Err(other) => format!("!{other}"),
        };
        let all = self.all_gather_bytes(told.as_bytes())?;
        let value = result?;
        match all.iter().position(|told| !told.is_empty()) {
            None => Ok(value),
            Some(index) => {
                let reason = String::from_utf8_lossy(&all[index]).trim_start_matches('!').to_owned();
                Err(Error::PeerFailed { rank: Some(self.ranks()[index]), reason })
            }
        }
    }
}
