//! Operations under way.

use std::cell::Cell;
use std::fmt;
use std::time::{Duration, Instant};

use crate::Result;
use crate::ffi::{self, RawWork};

/// An operation under way. It keeps its tensors alive; dropping it does not stop the operation.
#[must_use = "the result is there only after `wait`"]
pub struct Work {
    op: &'static str,
    parts: Vec<Part>,
}

struct Part {
    raw: *mut RawWork,
    done: Cell<bool>,
}

// SAFETY: c10d's works may be waited for on any thread, one at a time.
unsafe impl Send for Part {}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: ours alone, freed once.
        unsafe { ffi::ft_work_free(self.raw) };
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Work {
    /// Takes over a handle of the shim.
    pub(super) fn new(op: &'static str, raw: *mut RawWork) -> Self {
        Self { op, parts: vec![Part { raw, done: Cell::new(false) }] }
    }

    /// One work of several.
    pub(super) fn all(op: &'static str, works: Vec<Work>) -> Self {
        Self { op, parts: works.into_iter().flat_map(|work| work.parts).collect() }
    }

    /// Waits for the operation: on the CPU until it is done; on CUDA until the current stream is made to wait for it,
    /// or, with a timeout, until it is done.
    ///
    /// Without a timeout of its own the wait ends, with an error, at the group's. After a timeout of a collective one
    /// may wait again. A timeout of Gloo's `send` or `recv` breaks the whole group, as Gloo has it.
    ///
    /// # Errors
    /// [`crate::Error::Timeout`] when peers do not do their part in time; [`crate::Error::Torch`] when one of them
    /// is gone or gave other shapes.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let start = Instant::now();
        for part in self.parts.iter().filter(|part| !part.done.get()) {
            let left = timeout.map_or(0, |timeout| ffi::milliseconds(timeout.saturating_sub(start.elapsed())));
            // SAFETY: the work is live.
            ffi::call(self.op, |failure| unsafe { ffi::ft_work_wait(part.raw, left, failure) })?;
            part.done.set(true);
        }
        Ok(())
    }

    /// Whether the operation has ended, well or not. Gloo cannot tell of `send` and `recv`, which count as under way
    /// until they are waited for.
    pub fn is_completed(&self) -> bool {
        // SAFETY: the works are live.
        self.parts.iter().all(|part| part.done.get() || unsafe { ffi::ft_work_completed(part.raw) })
    }
}
