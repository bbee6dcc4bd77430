//! The names of the collectives, and the ways in which values are combined.

use std::fmt;

/// Which collective: what the recorder counts by and what errors name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Op {
    /// Every rank gets the combination of all ranks' tensors.
    AllReduce,
    /// Every rank gets the concatenation of all ranks' tensors.
    AllGather,
    /// Every rank gets its own slice of the sum of all ranks' tensors.
    ReduceScatter,
    /// Every rank gets one slice of every rank's tensor.
    AllToAll,
    /// Every rank gets the root's tensor.
    Broadcast,
    /// One tensor leaves for one rank.
    Send,
    /// One tensor arrives from one rank.
    Recv,
    /// No rank leaves before all have entered.
    Barrier,
}

impl Op {
    /// Every operation, in a fixed order.
    pub const ALL: [Op; 8] =
        [Op::AllReduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Broadcast, Op::Send, Op::Recv, Op::Barrier];

    /// The name that messages, metrics and traces use.
    pub const fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all-reduce",
            Op::AllGather => "all-gather",
            Op::ReduceScatter => "reduce-scatter",
            Op::AllToAll => "all-to-all",
            Op::Broadcast => "broadcast",
            Op::Send => "send",
            Op::Recv => "recv",
            Op::Barrier => "barrier",
        }
    }

    /// Whether it is between two ranks and not among all ranks of the group.
    pub const fn is_point_to_point(self) -> bool {
        matches!(self, Op::Send | Op::Recv)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How an all-reduce combines values. There is no mean: a caller that wants one divides, once, where it is seen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their product.
    Product,
    /// The smallest of them.
    Min,
    /// The largest of them.
    Max,
}

impl ReduceOp {
    /// Every way, in a fixed order.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];

    /// The name that messages use.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Product => "product",
            ReduceOp::Min => "minimum",
            ReduceOp::Max => "maximum",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
