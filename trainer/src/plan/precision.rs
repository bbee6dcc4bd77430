//! Which numbers a run computes in.

use crate::config::Config;
use crate::config::sections::{DtypeName, Float8Recipe};

/// A floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dtype {
    /// 8 exponent bits, 7 of mantissa.
    BFloat16,
    /// Single precision.
    Float32,
    /// Double precision.
    Float64,
}

impl Dtype {
    /// libtorch's name of it.
    pub fn kind(self) -> tch::Kind {
        match self {
            Self::BFloat16 => tch::Kind::BFloat16,
            Self::Float32 => tch::Kind::Float,
            Self::Float64 => tch::Kind::Double,
        }
    }
}

impl From<DtypeName> for Dtype {
    fn from(name: DtypeName) -> Self {
        match name {
            DtypeName::BFloat16 => Self::BFloat16,
            DtypeName::Float32 => Self::Float32,
            DtypeName::Float64 => Self::Float64,
        }
    }
}

/// Which numbers each part of a step is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Parameters and optimizer states between steps.
    pub parameters: Dtype,
    /// Parameters and activations in forward and backward.
    pub compute: Dtype,
    /// Sums of gradients, over accumulation and over ranks.
    pub reduce: Dtype,
}

impl Precision {
    pub(super) fn of(config: &Config) -> Self {
        let training = &config.training;
        Self {
            parameters: training.dtype.into(),
            compute: training.mixed_precision_param.into(),
            reduce: training.mixed_precision_reduce.into(),
        }
    }
}

/// Which products are in Float8, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Float8Plan {
    /// What shares a scale.
    pub recipe: Float8Recipe,
    /// Projections that are left as they are: those whose names hold one of these.
    pub filter_fqns: Vec<String>,
    /// Without the device's own products.
    pub emulate: bool,
    /// Sharded weights are gathered in Float8.
    pub all_gather: bool,
    /// The scales of all weights are computed together after each update.
    pub precompute_scales: bool,
}

impl Float8Plan {
    /// What the config asks for, if it does.
    pub(super) fn of(config: &Config) -> Option<Self> {
        let float8 = &config.quantize.linear.float8;
        let names = &float8.filter_fqns.0;
        config.model.converters.0.iter().any(|name| name.rsplit('.').next() == Some("float8")).then(|| Self {
            recipe: float8.recipe_name.unwrap_or(Float8Recipe::Tensorwise),
            // TorchTitan's configs name the head; where nothing is named, its gradients still need more bits.
            filter_fqns: if names.is_empty() { vec!["output".to_owned()] } else { names.clone() },
            emulate: float8.emulate,
            all_gather: float8.enable_fsdp_float8_all_gather,
            precompute_scales: float8.precompute_float8_dynamic_scale_for_fsdp,
        })
    }
}
