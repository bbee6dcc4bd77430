//! The three ways in which queries meet the keys of other ranks.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// How the queries of a rank meet the keys and values of the others. All give the same result, up to rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Method {
    /// Keys and values are passed round, a block of each rank at a time, the next in flight while this one is computed
    /// with (ring attention, Liu et al. 2023, <https://arxiv.org/abs/2310.01889>). The least memory.
    Ring,
    /// Keys and values of all ranks are gathered (Llama 3, <https://arxiv.org/abs/2407.21783>, section 3.3.2): one
    /// collective, but for the time of the call memory for the keys and values of the whole sequence. The gradients'
    /// sums are scattered back.
    #[default]
    AllGather,
    /// Sequences are exchanged for heads: each rank computes some heads over the whole sequence (DeepSpeed Ulysses,
    /// Jacobs et al. 2023, <https://arxiv.org/abs/2309.14509>). Any number of heads will do; with fewer than ranks, some
    /// ranks are idle.
    AllToAll,
}

impl Method {
    /// Every method.
    pub const ALL: [Method; 3] = [Method::Ring, Method::AllGather, Method::AllToAll];

    /// Its name in a config.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Method::Ring => "ring",
            Method::AllGather => "allgather",
            Method::AllToAll => "ulysses",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The names of TorchTitan's `context_parallel_rotate_method`, "allgather" and "alltoall" (which is the ring: its blocks
/// travel by all-to-all there), and in addition "ring" and "ulysses".
impl FromStr for Method {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "ring" | "alltoall" => Ok(Method::Ring),
            "allgather" => Ok(Method::AllGather),
            "ulysses" => Ok(Method::AllToAll),
            _ => Err(Error::UnknownName {
                setting: "context_parallel_rotate_method",
                name: name.to_owned(),
                known: "\"allgather\", \"alltoall\" (\"ring\"), \"ulysses\"",
            }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for method in Method::ALL {
            assert_eq!(method.to_string().parse::<Method>().unwrap(), method);
        }
        assert_eq!("alltoall".parse::<Method>().unwrap(), Method::Ring);
        let message = "p2p".parse::<Method>().unwrap_err().to_string();
        assert!(message.contains("p2p") && message.contains("\"ulysses\""), "{message}");
    }
}
