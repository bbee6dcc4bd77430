//! The progress bar, with the time left; on a terminal alone.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The bar of this process, above which log lines are written.
static CURRENT: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Takes a line, and says whether it did.
type Lines = Box<dyn Fn(&str) -> bool + Send>;

/// Where lines go that would stand above the bar, if somebody else has the terminal.
static LINES: Mutex<Option<Lines>> = Mutex::new(None);

/// From now on, lines go here as long as it takes them, and there is no progress bar: somebody else has the terminal.
pub fn show_lines(take: impl Fn(&str) -> bool + Send + 'static) {
    *LINES.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(take));
}

/// Writes a line to the terminal with the bar out of the way; or gives it to whoever has the terminal.
///
/// # Errors
/// What `write` fails with.
pub fn line_above_bar(line: &str, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let taken = LINES.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(|take| take(line));
    if taken { Ok(()) } else { above_bar(write) }
}

/// A progress bar over the steps of a run. Lines that are written while it is shown stand above it. Where standard error
/// is no terminal, there is nothing to see.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A bar of so many steps, of which so many are done.
    pub fn new(steps: u64, done: u64) -> Self {
        Self::of("steps", steps, done)
    }

    /// A bar of so many things of this kind, of which so many are done.
    pub fn of(kind: &str, count: u64, done: u64) -> Self {
        // Twice a second: what is redrawn oftener flickers, and costs time.
        let elsewhere = LINES.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let target = if elsewhere { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(2) };
        let bar = ProgressBar::with_draw_target(Some(count), target);
        if let Ok(style) =
            ProgressStyle::with_template(&format!("{{bar:30}} {{pos}}/{{len}} {kind}, {{eta_precise}} left"))
        {
            bar.set_style(style);
        }
        bar.set_position(done);
        bar.reset_eta();
        *current() = Some(bar.clone());
        Self { bar }
    }

    /// So many steps are done.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        *current() = None;
        self.bar.finish_and_clear();
    }
}

fn current() -> MutexGuard<'static, Option<ProgressBar>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes to the terminal with the bar out of the way, if there is one.
///
/// # Errors
/// What `write` fails with.
pub fn above_bar<T>(write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let bar = current().clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}
