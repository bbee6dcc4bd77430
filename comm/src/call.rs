//! A collective as data: what a rank asks of a group, with the tensors left out.
//!
//! One value of [`Call`] is all that a backend needs to know besides the tensors; it is also what ranks compare to find
//! out that they disagree, and what the recorder measures.

use std::fmt;

use tch::Kind;

use crate::{Op, ReduceOp};

/// How an axis is dealt out to the ranks of a group: `sizes[i]` consecutive elements for rank `i`, in rank order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The tensor's axis.
    pub axis: usize,
    /// One length per rank of the group; zero is a length.
    pub sizes: Vec<i64>,
}

impl Cut {
    /// Where along the axis the part of `rank` begins.
    pub fn offset(&self, rank: usize) -> i64 {
        self.sizes[..rank].iter().sum()
    }

    /// The length of the whole axis.
    pub fn total(&self) -> i64 {
        self.sizes.iter().sum()
    }

    fn is_even(&self) -> bool {
        self.sizes.windows(2).all(|pair| pair[0] == pair[1])
    }
}

/// What a collective does, with its parameters. Ranks are group ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Collective {
    /// Combines all tensors, which have one shape.
    AllReduce {
        /// How values are combined.
        reduce: ReduceOp,
    },
    /// Concatenates the ranks' tensors.
    AllGather {
        /// What each rank brings.
        parts: Cut,
    },
    /// Sums all tensors, which have one shape, and gives each rank a part.
    ReduceScatter {
        /// What each rank takes away.
        parts: Cut,
    },
    /// Gives part `j` of this rank's tensor to rank `j`, and concatenates what arrives.
    AllToAll {
        /// How this rank's tensor is dealt out.
        split: Cut,
        /// What arrives from each rank.
        concat: Cut,
    },
    /// Copies the tensor of `root` to all.
    Broadcast {
        /// Whose tensor.
        root: usize,
    },
    /// Sends a tensor.
    Send {
        /// To whom.
        to: usize,
    },
    /// Receives a tensor.
    Recv {
        /// From whom.
        from: usize,
    },
    /// Waits for all.
    Barrier,
}

/// One rank's request: what, and the shape and kind of the tensor that it brings (for a receive: that it expects).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// What is to be done.
    pub what: Collective,
    /// The shape of this rank's tensor.
    pub shape: Vec<i64>,
    /// Its element type.
    pub kind: Kind,
}

impl Call {
    /// The collective's name.
    pub fn op(&self) -> Op {
        match self.what {
            Collective::AllReduce { .. } => Op::AllReduce,
            Collective::AllGather { .. } => Op::AllGather,
            Collective::ReduceScatter { .. } => Op::ReduceScatter,
            Collective::AllToAll { .. } => Op::AllToAll,
            Collective::Broadcast { .. } => Op::Broadcast,
            Collective::Send { .. } => Op::Send,
            Collective::Recv { .. } => Op::Recv,
            Collective::Barrier => Op::Barrier,
        }
    }

    /// The other rank of a send or receive.
    pub fn peer(&self) -> Option<usize> {
        match self.what {
            Collective::Send { to: peer } | Collective::Recv { from: peer } => Some(peer),
            _ => None,
        }
    }

    /// The shape of what rank `rank` of the group gets; of a send and a barrier, that of what it brings.
    pub fn output_shape(&self, rank: usize) -> Vec<i64> {
        let mut shape = self.shape.clone();
        match &self.what {
            Collective::AllGather { parts } => shape[parts.axis] = parts.total(),
            Collective::ReduceScatter { parts } => shape[parts.axis] = parts.sizes[rank],
            Collective::AllToAll { split, concat } => {
                shape[split.axis] = split.sizes[rank];
                shape[concat.axis] = concat.total();
            }
            _ => {}
        }
        shape
    }

    /// The bytes of this rank's tensor.
    pub fn tensor_bytes(&self) -> u64 {
        self.elements() * self.kind.elt_size_in_bytes() as u64
    }

    /// The bytes that rank `rank` of a group of `size` sends, by the formulas of bandwidth-optimal algorithms:
    ///
    /// | collective | bytes |
    /// |---|---|
    /// | all-reduce | 2 (n-1)/n of the tensor |
    /// | all-gather | (n-1)/n of the result |
    /// | reduce-scatter | (n-1)/n of the tensor |
    /// | all-to-all | the tensor without the part that stays |
    /// | broadcast | (n-1)/n of the tensor: the average over the ranks of a pipelined ring |
    /// | send | the tensor |
    /// | receive, barrier | none |
    pub fn bytes_sent(&self, rank: usize, size: usize) -> u64 {
        let (elements, others, size) = (self.elements(), size as u64 - 1, size as u64);
        let sent = match &self.what {
            Collective::AllReduce { .. } => 2 * elements * others / size,
            Collective::AllGather { .. } => product(&self.output_shape(rank)) * others / size,
            Collective::ReduceScatter { .. } | Collective::Broadcast { .. } => elements * others / size,
            Collective::AllToAll { split, .. } => match split.total() {
                0 => 0,
                total => elements / total as u64 * (total - split.sizes[rank]) as u64,
            },
            Collective::Send { .. } => elements,
            Collective::Recv { .. } | Collective::Barrier => 0,
        };
        sent * self.kind.elt_size_in_bytes() as u64
    }

    /// Whether rank `rank` calling this, and rank `other_rank` calling `other`, can both be served. Collectives only.
    pub fn agrees(&self, rank: usize, other: &Call, other_rank: usize) -> bool {
        let same_but = |axis: usize| {
            self.shape.len() == other.shape.len()
                && self.shape.iter().zip(&other.shape).enumerate().all(|(i, (a, b))| i == axis || a == b)
        };
        self.kind == other.kind
            && match (&self.what, &other.what) {
                (Collective::AllGather { parts }, Collective::AllGather { parts: theirs }) => {
                    parts == theirs && same_but(parts.axis)
                }
                (
                    Collective::AllToAll { split, concat },
                    Collective::AllToAll { split: their_split, concat: their_concat },
                ) => {
                    if split.axis == concat.axis {
                        // Each pair of ranks has a length of its own, in each direction.
                        same_but(split.axis)
                            && (split.axis, concat.axis) == (their_split.axis, their_concat.axis)
                            && split.sizes[other_rank] == their_concat.sizes[rank]
                            && concat.sizes[other_rank] == their_split.sizes[rank]
                    } else {
                        (split, concat) == (their_split, their_concat) && same_but(concat.axis)
                    }
                }
                (a, b) => a == b && self.shape == other.shape,
            }
    }

    /// The call in words that are the same on all ranks exactly if the ranks agree; only an exchange along one axis can
    /// disagree in more than they tell.
    pub fn signature(&self) -> String {
        let mut shared = self.clone();
        match &mut shared.what {
            Collective::AllGather { parts } => shared.shape[parts.axis] = parts.total(),
            Collective::AllToAll { split, concat } if split.axis == concat.axis => {
                shared.shape[split.axis] = 0;
                split.sizes.clear();
                concat.sizes.clear();
            }
            Collective::AllToAll { concat, .. } => shared.shape[concat.axis] = concat.total(),
            _ => {}
        }
        shared.to_string()
    }

    fn elements(&self) -> u64 {
        product(&self.shape)
    }
}

fn product(shape: &[i64]) -> u64 {
    shape.iter().map(|&length| length as u64).product()
}

/// As messages say it: `all-gather of Float [2, 3] along axis 0`.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.op())?;
        if self.what == Collective::Barrier {
            return Ok(());
        }
        write!(f, " of {:?} {:?}", self.kind, self.shape)?;
        let along = |f: &mut fmt::Formatter<'_>, parts: &Cut| match parts.is_even() {
            true => write!(f, "axis {}", parts.axis),
            false => write!(f, "axis {} in parts {:?}", parts.axis, parts.sizes),
        };
        match &self.what {
            Collective::AllReduce { reduce } => write!(f, " to its {reduce}"),
            Collective::AllGather { parts } | Collective::ReduceScatter { parts } => {
                write!(f, " along ")?;
                along(f, parts)
            }
            Collective::AllToAll { split, concat } => {
                write!(f, " from ")?;
                along(f, split)?;
                write!(f, " to ")?;
                along(f, concat)
            }
            Collective::Broadcast { root } => write!(f, " from group rank {root}"),
            Collective::Send { to } => write!(f, " to group rank {to}"),
            Collective::Recv { from } => write!(f, " from group rank {from}"),
            Collective::Barrier => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(what: Collective, shape: &[i64]) -> Call {
        Call { what, shape: shape.to_vec(), kind: Kind::Float }
    }

    fn parts(axis: usize, sizes: &[i64]) -> Cut {
        Cut { axis, sizes: sizes.to_vec() }
    }

    #[test]
    fn bytes_follow_the_table() {
        let reduce = Collective::AllReduce { reduce: ReduceOp::Sum };
        assert_eq!(call(reduce, &[8]).bytes_sent(0, 4), 2 * 8 * 3 / 4 * 4);
        let gather = Collective::AllGather { parts: parts(1, &[1, 3]) };
        assert_eq!(call(gather.clone(), &[5, 1]).bytes_sent(0, 2), 5 * 4 / 2 * 4);
        assert_eq!(call(gather, &[5, 3]).bytes_sent(1, 2), 5 * 4 / 2 * 4);
        let scatter = Collective::ReduceScatter { parts: parts(0, &[2, 2]) };
        assert_eq!(call(scatter, &[4]).bytes_sent(0, 2), 4 / 2 * 4);
        let exchange = Collective::AllToAll { split: parts(0, &[1, 3]), concat: parts(1, &[2, 2]) };
        assert_eq!(call(exchange.clone(), &[4, 2]).bytes_sent(0, 2), 3 * 2 * 4);
        assert_eq!(call(exchange, &[4, 2]).bytes_sent(1, 2), 2 * 4);
        assert_eq!(call(Collective::Send { to: 1 }, &[3]).bytes_sent(0, 2), 12);
        assert_eq!(call(Collective::Recv { from: 1 }, &[3]).bytes_sent(0, 2), 0);
        assert_eq!(call(Collective::Barrier, &[0]).bytes_sent(0, 2), 0);
    }

    #[test]
    fn gathers_agree_on_parts_and_on_the_other_axes() {
        let gather = |sizes: &[i64], shape: &[i64]| call(Collective::AllGather { parts: parts(0, sizes) }, shape);
        let mine = gather(&[2, 3], &[2, 7]);
        assert!(mine.agrees(0, &gather(&[2, 3], &[3, 7]), 1));
        assert!(!mine.agrees(0, &gather(&[2, 3], &[3, 8]), 1));
        assert!(!mine.agrees(0, &gather(&[2, 4], &[4, 7]), 1));
        assert!(!mine.agrees(0, &Call { kind: Kind::Double, ..gather(&[2, 3], &[3, 7]) }, 1));
        assert!(!mine.agrees(0, &call(Collective::Barrier, &[0]), 1));
    }

    #[test]
    fn exchanges_along_one_axis_agree_pair_by_pair() {
        let exchange = |split: &[i64], concat: &[i64]| {
            let what = Collective::AllToAll { split: parts(0, split), concat: parts(0, concat) };
            call(what, &[split.iter().sum()])
        };
        // Rank 0 keeps 1 and sends 2; rank 1 sends 5 and keeps 4.
        let mine = exchange(&[1, 2], &[1, 5]);
        assert!(mine.agrees(0, &exchange(&[5, 4], &[2, 4]), 1));
        assert!(!mine.agrees(0, &exchange(&[5, 4], &[3, 4]), 1));
        assert!(!mine.agrees(0, &exchange(&[6, 4], &[2, 4]), 1));
    }

    #[test]
    fn reads_as_a_sentence() {
        let uneven = call(Collective::AllGather { parts: parts(0, &[2, 3]) }, &[2, 7]);
        assert_eq!(uneven.to_string(), "all-gather of Float [2, 7] along axis 0 in parts [2, 3]");
        assert_eq!(call(Collective::Barrier, &[0]).to_string(), "barrier");
    }
}
