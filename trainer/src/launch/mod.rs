//! Ranks as processes: who we are among them, and a launcher that starts them on this machine.
//!
//! A rank knows its place by the environment that `torchrun`, Slurm and Kubernetes operators set
//! ([`Place::read`]). Where nobody set it, [`launch`] starts the ranks itself, as child processes of the same
//! binary with that environment; it prefixes their output, and ends all of them when one dies or when it is told to end.

mod output;
pub(crate) mod parent;
mod place;
mod ranks;
mod supervise;

pub use output::{Prefix, Sink};
pub use parent::{follow_parent, launched};
pub use place::Place;
pub use ranks::{Machines, Spec};
pub use supervise::{Death, Ended, LaunchError, Outcome, RankEnd, launch};
