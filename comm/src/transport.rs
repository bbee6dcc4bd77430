//! What a backend implements: one group's raw collectives, and how a rank joins a group.

use std::fmt;
use std::sync::Arc;

use tch::Tensor;

use crate::{Call, Members, Result};

/// The tensors of one call, on the mesh's device, contiguous and free of autograd.
#[derive(Debug, Default)]
pub struct Buffers {
    /// What this rank brings; absent for a receive and a barrier.
    pub input: Option<Tensor>,
    /// Where the result is to be written, of shape [`Call::output_shape`]. When absent, the backend allocates.
    /// For an all-reduce or a broadcast it may be `input` itself.
    pub output: Option<Tensor>,
    /// Whether `input` is the backend's to keep: nobody will change it. A send of such a tensor is done at once as far
    /// as its caller is concerned, and its [`Work`] does not wait.
    pub donated: bool,
}

/// One group's collectives over some medium. Arguments have been checked when they arrive here.
///
/// An implementor keeps three promises, which the [conformance suite](crate::conformance) holds it to:
/// - `start` does not wait for other ranks, so several calls can be in flight, and a send needs no receive to return;
/// - once `wait` has returned, the input may be changed, and the output shares memory with no other rank;
/// - whoever waits for a rank that failed, or for longer than the backend's timeout, gets an error.
pub trait Transport: Send + Sync + fmt::Debug {
    /// Begins a call. `sequence` counts the collectives of this rank in this group from 0, and apart from them the messages
    /// of each sender to each receiver.
    ///
    /// # Errors
    /// Whatever can be told at once: a mismatch with another rank, a failed peer, a refusal of the backend.
    fn start(&self, sequence: u64, call: Call, buffers: Buffers) -> Result<Box<dyn Work>>;

    /// Whether `start` waits for other ranks all the same, so that a rank may stand still in it.
    fn waits_at_start(&self) -> bool {
        false
    }
}

/// A call under way.
pub trait Work: Send {
    /// Whether [`Work::wait`] would return without waiting for another rank. May be pessimistic.
    fn is_done(&self) -> bool;

    /// Waits for the end, and gives the result: an undefined tensor for a send and a barrier.
    ///
    /// # Errors
    /// Timeouts, failed peers, mismatches, refusals of the backend.
    fn wait(self: Box<Self>) -> Result<Tensor>;
}

/// How one rank joins groups.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Joins a group of at least two members. All of them call this, in the same order for all groups.
    ///
    /// # Errors
    /// [`crate::Error::Connect`], or a failed peer.
    fn join(&self, members: &Members) -> Result<Arc<dyn Transport>>;

    /// Tells the other ranks, as far as the backend can, that this one has failed and why. The first to fail is the one
    /// that they will name.
    fn fail(&self, rank: usize, reason: &str);
}
