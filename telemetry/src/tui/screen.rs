//! The thread that draws the live view.

use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use super::draw::draw;
use super::view::View;
use crate::{Error, Result};

/// From one drawing to the next.
const PERIOD: Duration = Duration::from_millis(250);

/// A live view on the terminal, until it is dropped or whoever sits there leaves it with `q` or Ctrl-C. The run goes on in
/// either case, and a second Ctrl-C reaches it as ever.
#[derive(Debug)]
pub struct Tui {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Tui {
    /// Opens the view. While it is open, nothing else may write to the terminal: lines go to [`View::line`].
    ///
    /// # Errors
    /// [`Error::NoTerminal`] when standard output is not a terminal; another when it cannot be drawn on.
    pub fn start(view: View) -> Result<Self> {
        if !io::stdout().is_terminal() {
            return Err(Error::NoTerminal);
        }
        // A panic anywhere gives the terminal back, too: a hook of `ratatui` sees to it.
        let terminal = ratatui::try_init().map_err(Error::Terminal)?;
        view.set_open(true);
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = thread::Builder::new().name("live view".to_owned()).spawn(move || {
            show(terminal, &view, &told);
            ratatui::restore();
            view.set_open(false);
        });
        match thread {
            Ok(thread) => Ok(Self { stop, thread: Some(thread) }),
            Err(error) => {
                ratatui::restore();
                Err(Error::Terminal(error))
            }
        }
    }
}

impl Drop for Tui {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Draws until told to stop, or until the terminal is gone.
fn show(mut terminal: DefaultTerminal, view: &View, stop: &AtomicBool) {
    let mut drawn: Option<Instant> = None;
    while !stop.load(Ordering::Relaxed) {
        if drawn.is_none_or(|drawn| drawn.elapsed() >= PERIOD) {
            if terminal.draw(|frame| draw(frame, &view.state(), Instant::now())).is_err() {
                return;
            }
            drawn = Some(Instant::now());
        }
        match event::poll(PERIOD / 5) {
            Ok(false) => {}
            Ok(true) => match event::read() {
                Ok(event) if leaves(&event) => return,
                Ok(Event::Resize(..)) => drawn = None,
                _ => {}
            },
            // Without a keyboard there is still something to see.
            Err(_) => thread::sleep(PERIOD),
        }
    }
}

/// Whether this is a key that leaves the view.
fn leaves(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press
        && matches!((key.code, control), (KeyCode::Char('q'), false) | (KeyCode::Char('c'), true))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ratatui::crossterm::event::KeyEvent;

    #[test]
    fn q_and_ctrl_c_leave() {
        let press = |key, modifiers| leaves(&Event::Key(KeyEvent::new(KeyCode::Char(key), modifiers)));
        assert!(press('q', KeyModifiers::NONE) && press('c', KeyModifiers::CONTROL));
        assert!(!press('c', KeyModifiers::NONE) && !press('x', KeyModifiers::NONE) && !leaves(&Event::FocusLost));
    }

    /// Tests write to a pipe.
    #[test]
    fn without_a_terminal_there_is_one_line() {
        if io::stdout().is_terminal() {
            return;
        }
        let view = View::new("", 1);
        assert!(matches!(Tui::start(view.clone()), Err(Error::NoTerminal)));
        assert!(!view.line("still the caller's"));
    }
}
