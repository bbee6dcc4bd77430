//! Which numbers a run computes in.

use crate::config::Config;
use crate::config::sections::DtypeName;

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
