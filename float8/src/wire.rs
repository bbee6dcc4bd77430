//! Weights that travel in eight bits.

use std::sync::Arc;

use ferrotitan_comm::{BoxError, Wire};
use tch::{Kind, Tensor};

use crate::cast::cast;
use crate::error::Context as _;
use crate::site::Site;
use crate::{Format, Result};

/// The form in which a weight's shards travel in an all-gather: E4M3, by the scale of the whole weight, so that what is
/// gathered equals the whole weight cast at once, to the bit.
///
/// Gives what arrives as numbers in the dtype that the model computes in; the projection's products get its codes back
/// without a rounding error. Every rank encodes before any decodes, as gathers do.
#[derive(Debug, Clone)]
pub struct Float8Wire(pub(crate) Arc<Site>);

/// That of weights in every recipe.
const FORMAT: Format = Format::E4m3;

impl Float8Wire {
    fn write(&self, shard: &Tensor, wire: &mut Tensor) -> Result<()> {
        let shard = self.0.as_computed(shard)?;
        let scale = self.0.scale_to_travel(&shard, FORMAT)?;
        let codes = cast(&shard, &scale, FORMAT)?;
        wire.f_copy_(&codes).context("sending a weight")
    }

    fn read(&self, wire: &Tensor, value: &mut Tensor) -> Result<()> {
        let Some(scale) = self.0.travelled() else {
            return Err(crate::Error::NeverSent { weight: self.0.name() });
        };
        let inverse = scale.f_reciprocal().context("a scale")?;
        let numbers = wire.f_to_kind(Kind::Float).and_then(|codes| codes.f_mul(&inverse));
        numbers.and_then(|numbers| value.f_copy_(&numbers)).context("receiving a weight")
    }
}

impl Wire for Float8Wire {
    fn kind(&self) -> Kind {
        FORMAT.kind()
    }

    fn encode(&self, shard: &Tensor, wire: &mut Tensor) -> Result<(), BoxError> {
        Ok(self.write(shard, wire)?)
    }

    fn decode(&self, wire: &Tensor, value: &mut Tensor) -> Result<(), BoxError> {
        Ok(self.read(wire, value)?)
    }
}
