//! What every backend must do: the suite that all of them pass.
//!
//! For whoever implements a [`Backend`](crate::Backend). The suite is a list of [checks](CHECKS); each runs bodies on
//! the ranks of meshes of several shapes, through [`Ranks`], which is all that it needs to know of a backend. Every rank
//! draws the same cases, knows what every other rank holds, and compares what it gets with a dense computation of its
//! own.

mod case;
mod faults;
mod flight;
mod gradients;
mod moving;
mod reducing;

use std::time::Duration;

use ferrotitan_mesh::{Degrees, View};

use crate::{DeviceMesh, Group};

pub use case::{Case, Draw};
pub use gradients::Form;
pub use moving::{check_all_gather, check_all_to_all, check_broadcast, check_ring};
pub use reducing::{check_all_reduce, check_reduce_scatter};

/// What a rank finds: nothing wrong, or what.
pub type Verdict = Result<(), String>;

/// A way to run a body on all ranks of a mesh. With ranks as threads one call runs them all; with ranks as processes
/// each process calls it, and it runs that process's rank.
pub trait Ranks {
    /// The world sizes that this can run, ascending.
    fn sizes(&self) -> Vec<usize>;

    /// Runs the body with the given timeout. A body that fails must make the other ranks' waiting end.
    ///
    /// # Errors
    /// The error of the first rank whose body failed, among those that this call ran.
    fn run(
        &self,
        degrees: Degrees,
        timeout: Duration,
        body: &(dyn Fn(&DeviceMesh) -> Verdict + Sync),
    ) -> crate::Result<()>;

    /// A timeout that is short for a test, and long enough to connect.
    fn short(&self) -> Duration;

    /// Whether a mismatch between ranks is found out.
    fn detects_mismatch(&self) -> bool;
}

/// How long a rank waits in checks that are not about waiting.
const PATIENT: Duration = Duration::from_secs(60);

/// A check and its name.
pub type Check = (&'static str, fn(&dyn Ranks) -> Verdict);

/// Every check of the suite.
pub const CHECKS: &[Check] = &[
    ("reductions equal the dense ones", reducing::reductions),
    ("half precision is combined in single", reducing::half_precision),
    ("gathers, exchanges and broadcasts equal the dense ones", moving::movements),
    ("messages go round a ring", moving::rings),
    ("numbers, bytes and agreement", moving::values),
    ("subgroups of a mesh keep to themselves", moving::subgroups),
    ("gradients equal the dense ones", gradients::gradients),
    ("an unused result still takes part backward", gradients::unused_results),
    ("many in flight, waited for in any order", flight::any_order),
    ("a wait needs no other rank's wait", flight::independent_waits),
    ("results are nobody else's memory", flight::no_aliasing),
    ("what is dropped still counts", flight::dropped),
    ("bad arguments are refused before anything is sent", faults::arguments),
    ("a failed rank ends the waiting of the others", faults::failed_rank),
    ("a late rank is a timeout that names it", faults::timeout),
    ("different calls are a mismatch", faults::mismatch),
];

/// Runs every check.
///
/// # Errors
/// The name of the first check that fails, and what it found.
pub fn all(ranks: &dyn Ranks) -> Verdict {
    for (name, check) in CHECKS {
        tracing::debug!("{name}");
        check(ranks).map_err(|found| format!("{name}: {found}"))?;
    }
    Ok(())
}

/// Runs a body on the group of all ranks, for every world size.
fn on_worlds(ranks: &dyn Ranks, body: impl Fn(&Group) -> Verdict + Sync) -> Verdict {
    for size in ranks.sizes() {
        let degrees = Degrees { dp_shard: size, ..Degrees::default() };
        let ran = ranks.run(degrees, PATIENT, &|mesh| body(&mesh.world()));
        ran.map_err(|error| format!("with {size} ranks: {error}"))?;
    }
    Ok(())
}

/// Meshes of `size` ranks with two or three dimensions larger than 1, and the views worth looking at.
fn meshes(size: usize) -> Vec<(Degrees, Vec<View>)> {
    let one = Degrees::default();
    let two = [View::DP_SHARD, View::TP, View::FSDP, View::WORLD, View::NONE];
    let three = [View::PP, View::DP_REPLICATE, View::TP, View::BATCH, View::PP.union(View::TP), View::WORLD];
    match size {
        4 => vec![(Degrees { dp_shard: 2, tp: 2, ..one }, two.to_vec())],
        6 => vec![(Degrees { dp_shard: 3, tp: 2, ..one }, two.to_vec())],
        8 => vec![
            (Degrees { dp_shard: 4, tp: 2, ..one }, two.to_vec()),
            (Degrees { pp: 2, dp_replicate: 2, tp: 2, ..one }, three.to_vec()),
        ],
        _ => Vec::new(),
    }
}

/// Fails with `found` unless `holds`.
fn ensure(holds: bool, found: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(found()) }
}

/// An error in words.
fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}
