//! The sections of the config, one a file or a few related ones: the place where every key, its default and its meaning
//! stands. Names, defaults and meanings are TorchTitan 0.2's; a comment says so where one is of this project.

mod checkpoint;
mod comm;
mod compute;
mod data;
mod job;
mod model;
mod optimizer;
mod parallelism;
mod quantize;

pub use checkpoint::{AsyncMode, Checkpoint, ExportDtype};
pub use comm::{BackendChoice, Comm, CommMode, FaultTolerance};
pub use compute::{ActivationCheckpoint, CheckpointMode, Compile, Debug, MemoryEstimation};
pub use data::{DataLoader, DtypeName, Training, Validation};
pub use job::{Experimental, Job, Metrics, MfuConvention, OtlpProtocol, Profiling};
pub use model::{AttnMask, Model};
pub use optimizer::{DecayType, Implementation, LrScheduler, Optimizer};
pub use parallelism::{ExpertBackend, Parallelism, RotateMethod};
pub use quantize::{
    CastKernel, Float8GroupedMm, Float8Linear, Float8Recipe, Float8Scaling, MxGroupedMm, MxLinear, MxRecipe, Quantize,
    QuantizedGroupedMm, QuantizedLinear,
};

use serde::{Deserialize, Deserializer, Serialize};

/// A list of names, written as a TOML list or as one string with commas, as TorchTitan's command line has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Names(pub Vec<String>);

impl Names {
    /// The list of these names.
    pub fn of(names: &[&str]) -> Self {
        Self(names.iter().map(|name| (*name).to_owned()).collect())
    }
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Names;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of strings")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Names, E> {
                let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
                Ok(Names(names.map(str::to_owned).collect()))
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Names, A::Error> {
                let mut names = Vec::new();
                while let Some(name) = seq.next_element()? {
                    names.push(name);
                }
                Ok(Names(names))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// Declares an enum of the words that a key admits, in lower case unless a word is given.
macro_rules! words {
    ( $(#[doc = $about:expr])* pub enum $name:ident { $( $(#[doc = $doc:expr])* $variant:ident = $word:literal , )* } ) => {
        $(#[doc = $about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $( $(#[doc = $doc])* #[serde(rename = $word)] $variant, )*
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $( Self::$variant => $word, )* })
            }
        }
    };
}
pub(crate) use words;
