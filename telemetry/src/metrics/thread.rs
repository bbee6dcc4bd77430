//! Which rank runs on a thread, for what has no recorder to tell it: spans.

use std::cell::Cell;

/// What a thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    /// Work of the process as a whole.
    Process,
    /// A rank that is exported.
    Exported(usize),
    /// A rank that is not.
    Silent,
}

thread_local! {
    static RUNS: Cell<Runs> = const { Cell::new(Runs::Process) };
}

/// Until it is dropped, this thread runs something else.
pub(super) struct Entered(Runs);

impl Entered {
    pub(super) fn new(runs: Runs) -> Self {
        Self(RUNS.replace(runs))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        RUNS.set(self.0);
    }
}

/// What this thread runs.
#[cfg(feature = "otlp")]
pub(crate) fn runs() -> Runs {
    RUNS.get()
}
