//! What the elements of a tensor are.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use tch::Kind;

use crate::{Error, Result};

macro_rules! dtypes {
    ($($name:ident $kind:ident $size:literal $safetensors:ident $doc:literal,)*) => {
        /// The type of a tensor's elements: what both safetensors and libtorch know.
        ///
        /// Its `Display` and [`FromStr`] are safetensors' names, such as `BF16`.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[non_exhaustive]
        pub enum Dtype {
            $(#[doc = $doc] $name,)*
        }

        impl Dtype {
            /// Every type.
            pub const ALL: &[Dtype] = &[$(Dtype::$name),*];

            /// The bytes of one element.
            pub const fn size(self) -> usize {
                match self { $(Dtype::$name => $size,)* }
            }

            /// libtorch's name of it.
            pub const fn kind(self) -> Kind {
                match self { $(Dtype::$name => Kind::$kind,)* }
            }

            /// safetensors' name of it.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$name => stringify!($safetensors),)* }
            }

            /// safetensors' own type for it.
            pub(crate) const fn safetensors(self) -> safetensors::Dtype {
                match self { $(Dtype::$name => safetensors::Dtype::$safetensors,)* }
            }

            /// The type that libtorch calls `kind`.
            ///
            /// # Errors
            /// [`Error::Unsupported`] for a quantized or other type that safetensors lacks.
            pub fn of(kind: Kind) -> Result<Self> {
                match kind {
                    $(Kind::$kind => Ok(Dtype::$name),)*
                    other => Err(Error::Unsupported {
                        what: format!("the element type {other:?}"),
                        reason: "safetensors has no name for it; convert the tensor first".to_owned(),
                    }),
                }
            }
        }
    };
}

dtypes! {
    Bool Bool 1 BOOL "One byte, 0 or 1.",
    U8 Uint8 1 U8 "Unsigned, 8 bits.",
    I8 Int8 1 I8 "Signed, 8 bits.",
    I16 Int16 2 I16 "Signed, 16 bits.",
    I32 Int 4 I32 "Signed, 32 bits.",
    I64 Int64 8 I64 "Signed, 64 bits.",
    F8E4M3 Float8e4m3fn 1 F8_E4M3 "Floating point of 8 bits, 4 of them exponent, without infinities.",
    F8E5M2 Float8e5m2 1 F8_E5M2 "Floating point of 8 bits, 5 of them exponent.",
    F8E4M3Fnuz Float8e4m3fnuz 1 F8_E4M3FNUZ "As [`Dtype::F8E4M3`], without negative zero.",
    F8E5M2Fnuz Float8e5m2fnuz 1 F8_E5M2FNUZ "As [`Dtype::F8E5M2`], without infinities and negative zero.",
    F16 Half 2 F16 "IEEE half precision.",
    Bf16 BFloat16 2 BF16 "The upper half of a single precision number.",
    F32 Float 4 F32 "IEEE single precision.",
    F64 Double 8 F64 "IEEE double precision.",
    C64 ComplexFloat 8 C64 "Complex, two single precision numbers.",
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Dtype::ALL.iter().find(|dtype| dtype.name() == name);
        found.copied().ok_or_else(|| Error::Unsupported {
            what: format!("the element type {name:?}"),
            reason: "libtorch has none like it".to_owned(),
        })
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
