//! The form in which a parameter's shard travels.

use std::fmt;

use tch::{Kind, Tensor};

use crate::BoxError;

/// How a shard of a parameter travels in an all-gather, where that is not its own dtype: one wire element for each of
/// its elements.
///
/// Every rank of the group encodes its own shard, and decodes the shards of all, so that a value must not depend on who
/// holds it. Both run without gradient tracking.
pub trait Wire: fmt::Debug + Send + Sync {
    /// The dtype on the way.
    fn kind(&self) -> Kind;

    /// Writes `shard`, this rank's part in the master dtype, into `wire`, of its shape and of [`kind`](Self::kind).
    ///
    /// # Errors
    /// Any, which ends the step.
    fn encode(&self, shard: &Tensor, wire: &mut Tensor) -> Result<(), BoxError>;

    /// Writes what some rank encoded into `value`, of its shape and of the dtype that forward passes compute in. `value`
    /// may be a view with gaps.
    ///
    /// # Errors
    /// Any, which ends the step.
    fn decode(&self, wire: &Tensor, value: &mut Tensor) -> Result<(), BoxError>;
}
