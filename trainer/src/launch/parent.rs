//! How a rank notices that its launcher is gone.
//!
//! The launcher holds the other end of each rank's standard input. However it ends, the system closes that end, and the
//! rank reads the end of its input.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{Read, Write};

/// Says to a rank that our launcher started it, and so that its standard input is the launcher's life.
pub(crate) const LAUNCHED: &str = "FERROTITAN_LAUNCHED";

/// Whether our launcher started this process.
pub fn launched() -> bool {
    std::env::var_os(LAUNCHED).is_some()
}

/// Ends this process when the launcher that started it is gone. Does nothing where no launcher of ours started it.
pub fn follow_parent() {
    if !launched() {
        return;
    }
    std::thread::spawn(|| {
        let mut buffer = [0; 64];
        let mut input = std::io::stdin();
        loop {
            match input.read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
        }
        let _ = writeln!(std::io::stderr(), "the launcher is gone, and so is this rank");
        // Not `exit`: it would run destructors of libtorch while other threads still compute, and may hang.
        let _ = kill(Pid::this(), Signal::SIGKILL);
    });
}
