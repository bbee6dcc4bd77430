//! Standard output and standard error. Whoever reads them may go away; that is no failure of ours.

use crate::config::{Loaded, Problem, Reporter};
use crate::metrics::wants_color;
use std::io::{self, IsTerminal, Write};

/// A line of standard error.
pub(super) fn say(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Text to standard output.
pub(super) fn print(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Whether standard error is colored.
pub(super) fn color() -> bool {
    wants_color(io::stderr().is_terminal())
}

/// All mistakes, to standard error.
pub(super) fn report(loaded: &Loaded, problems: &[Problem]) {
    let text = Reporter::new(color(), 120).render(loaded, problems);
    let _ = io::stderr().lock().write_all(text.as_bytes());
}
