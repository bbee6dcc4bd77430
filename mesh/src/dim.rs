//! The dimensions of a mesh, and sets of them flattened into one axis.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// One dimension of a mesh. The order is that of the mesh, outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Dim {
    /// Pipeline stages.
    Pp,
    /// Replicas of a sharded model.
    DpReplicate,
    /// Ranks that shard the parameters and read different data.
    DpShard,
    /// Ranks that share a sequence.
    Cp,
    /// Ranks that share a projection.
    Tp,
}

impl Dim {
    /// Every dimension, outermost first.
    pub const ALL: [Dim; 5] = [Dim::Pp, Dim::DpReplicate, Dim::DpShard, Dim::Cp, Dim::Tp];

    /// The name by which configs and messages call it.
    pub const fn name(self) -> &'static str {
        match self {
            Dim::Pp => "pp",
            Dim::DpReplicate => "dp_replicate",
            Dim::DpShard => "dp_shard",
            Dim::Cp => "cp",
            Dim::Tp => "tp",
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dim {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Dim::ALL.into_iter().find(|dim| dim.name() == name);
        found.ok_or_else(|| Error::UnknownName { name: name.to_owned() })
    }
}

/// A set of dimensions flattened into one axis, row-major in the mesh's order.
///
/// The ranks that differ only in these dimensions form one group of the view.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct View(u8);

impl View {
    /// No dimension: every rank is a group of its own.
    pub const NONE: View = View(0);
    /// Pipeline stages.
    pub const PP: View = View::of(Dim::Pp);
    /// Replicas of the sharded model.
    pub const DP_REPLICATE: View = View::of(Dim::DpReplicate);
    /// Ranks that shard the parameters and read different data.
    pub const DP_SHARD: View = View::of(Dim::DpShard);
    /// Ranks that share a sequence.
    pub const CP: View = View::of(Dim::Cp);
    /// Ranks that share a projection.
    pub const TP: View = View::of(Dim::Tp);
    /// Ranks that read different data: `dp_replicate * dp_shard`.
    pub const BATCH: View = View::DP_REPLICATE.union(View::DP_SHARD);
    /// Ranks that shard a parameter: `dp_shard * cp`.
    pub const FSDP: View = View::DP_SHARD.union(View::CP);
    /// Ranks that share a loss: `dp_replicate * dp_shard * cp`.
    pub const LOSS: View = View::BATCH.union(View::CP);
    /// All ranks.
    pub const WORLD: View = View::LOSS.union(View::PP).union(View::TP);

    /// Views with a name that is not the list of their dimensions.
    const NAMED: [(View, &'static str); 5] = [
        (View::NONE, "none"),
        (View::BATCH, "batch"),
        (View::FSDP, "fsdp"),
        (View::LOSS, "loss"),
        (View::WORLD, "world"),
    ];

    const fn of(dim: Dim) -> View {
        View(1 << dim as u8)
    }

    /// The view's name: its own if it has one, else its dimensions' joined by `+`. [`FromStr`] reads it back.
    pub fn name(self) -> Cow<'static, str> {
        if let Some((_, name)) = View::NAMED.into_iter().find(|(view, _)| *view == self) {
            return Cow::Borrowed(name);
        }
        let mut dims = self.dims();
        match (dims.next(), dims.next()) {
            (Some(only), None) => Cow::Borrowed(only.name()),
            _ => Cow::Owned(self.dims().map(Dim::name).collect::<Vec<_>>().join("+")),
        }
    }

    /// Whether `dim` is one of its dimensions.
    pub const fn contains(self, dim: Dim) -> bool {
        self.overlaps(View::of(dim))
    }

    /// Whether it has a dimension in common with `other`.
    pub const fn overlaps(self, other: View) -> bool {
        self.0 & other.0 != 0
    }

    /// The dimensions of either.
    #[must_use]
    pub const fn union(self, other: View) -> View {
        View(self.0 | other.0)
    }

    /// The dimensions of `self` that `other` lacks.
    #[must_use]
    pub const fn without(self, other: View) -> View {
        View(self.0 & !other.0)
    }

    /// Its dimensions, outermost first.
    pub fn dims(self) -> impl DoubleEndedIterator<Item = Dim> + Clone {
        Dim::ALL.into_iter().filter(move |dim| self.contains(*dim))
    }
}

impl From<Dim> for View {
    fn from(dim: Dim) -> Self {
        View::of(dim)
    }
}

impl FromIterator<Dim> for View {
    fn from_iter<I: IntoIterator<Item = Dim>>(dims: I) -> Self {
        dims.into_iter().fold(View::NONE, |view, dim| view.union(dim.into()))
    }
}

impl FromStr for View {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match View::NAMED.into_iter().find(|(_, own)| *own == name) {
            Some((view, _)) => Ok(view),
            None => name.split('+').map(Dim::from_str).collect(),
        }
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({})", self.name())
    }
}
