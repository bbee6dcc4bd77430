//! What can be chosen.

use std::fmt;
use std::str::FromStr;

use tch::Kind;

use crate::Error;

/// How a model is sharded. What travels in a gather is each parameter's compute dtype
/// ([`Parameter::set_compute_kind`](ferrotitan_nn::Parameter::set_compute_kind), which
/// [`Model::materialize`](ferrotitan_nn::Model::materialize) sets), else its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// What stays gathered between forward and backward.
    pub reshard_after_forward: Reshard,
    /// In what gradients are reduced, and accumulated between reductions. When absent: fp32, or fp64 where the
    /// parameter is fp64.
    pub reduce: Option<Kind>,
    /// Whether a unit casts its input to the compute dtype of its parameters, if they have one.
    pub cast_inputs: bool,
    /// Neighbouring layers that form one unit, by name; every other layer is a unit of its own.
    pub groups: Vec<Vec<String>>,
}

impl Default for Options {
    fn default() -> Self {
        // The final norm is too small to be worth collectives of its own.
        let groups = vec![vec!["norm".into(), "output".into()]];
        Self { reshard_after_forward: Reshard::Default, reduce: None, cast_inputs: true, groups }
    }
}

/// What becomes of a unit's gathered parameters after its forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reshard {
    /// Given back, except those of the forward's last unit, which the backward needs at once. On a mesh with pipeline
    /// stages nothing is given back, since every microbatch would gather again.
    #[default]
    Default,
    /// Given back, in every unit.
    Always,
    /// Kept until the backward is through with them.
    Never,
    /// As by default, but each block of so many consecutive ranks keeps all of them between its members, so that the
    /// backward gathers within the block.
    Ranks(usize),
}

impl FromStr for Reshard {
    type Err = Error;

    /// `default`, `always`, `never`, or a number of ranks, as `fsdp_reshard_after_forward` has them.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "default" => Ok(Reshard::Default),
            "always" => Ok(Reshard::Always),
            "never" => Ok(Reshard::Never),
            number => match number.parse() {
                Ok(ranks @ 1..) => Ok(Reshard::Ranks(ranks)),
                _ => Err(Error::Setting { text: text.to_owned() }),
            },
        }
    }
}

impl fmt::Display for Reshard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reshard::Default => f.pad("default"),
            Reshard::Always => f.pad("always"),
            Reshard::Never => f.pad("never"),
            Reshard::Ranks(ranks) => write!(f, "{ranks}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn reads_what_it_writes() {
        for reshard in [Reshard::Default, Reshard::Always, Reshard::Never, Reshard::Ranks(8)] {
            assert_eq!(reshard.to_string().parse::<Reshard>().unwrap(), reshard);
        }
        for wrong in ["0", "-1", "", "Never", "8.0"] {
            assert!(wrong.parse::<Reshard>().unwrap_err().to_string().contains(wrong), "{wrong}");
        }
    }
}
