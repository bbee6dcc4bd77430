//! Why a run hangs or has ended: what each rank left behind, and what follows from it.
//!
//! Each rank writes a [`Dump`] when a collective of its own fails, when another rank fails, and when it is told to end;
//! whoever started the ranks writes how they ended ([`Ends`]). [`read_folder`] reads them all, [`analyse`] finds the rank
//! that the others wait for, and the [`Report`] says it in words.

mod analyse;
mod dump;
mod faults;
mod folder;
mod mismatch;
mod waits;
mod words;

pub use analyse::{Cause, Finding, Missed, Report, analyse};
pub use dump::{Dump, End, Ends, Phase, Reason};
pub use folder::{Evidence, clear, read_folder};
pub use waits::Wait;
