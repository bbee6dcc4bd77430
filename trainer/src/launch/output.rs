//! The output of the ranks, line by line, each with the rank before it.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Where lines of all ranks go; one line is written as a whole.
#[derive(Clone)]
pub struct Sink(Arc<Mutex<Box<dyn Write + Send>>>);

impl std::fmt::Debug for Sink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sink")
    }
}

impl Sink {
    /// One that writes there.
    pub fn new(writer: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Box::new(writer))))
    }

    fn write(&self, bytes: &[u8]) {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody reads any more: the ranks go on all the same.
        let _ = writer.write_all(bytes).and_then(|()| writer.flush());
    }
}

/// What stands before a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// In a color for each rank.
    pub color: bool,
}

impl Prefix {
    fn of(self, rank: usize) -> Vec<u8> {
        // Cyan, green, yellow, blue, magenta: what is readable on black and on white. Red is for errors.
        const COLORS: [u8; 5] = [36, 32, 33, 34, 35];
        let prefix = if self.color {
            format!("\x1b[{}m[rank {rank}]\x1b[0m ", COLORS[rank % COLORS.len()])
        } else {
            format!("[rank {rank}] ")
        };
        prefix.into_bytes()
    }
}

/// Passes the lines of a rank on until it closes its end.
pub(super) fn forward(from: impl Read + Send + 'static, rank: usize, prefix: Prefix, to: Sink) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let prefix = prefix.of(rank);
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            line.extend_from_slice(&prefix);
            // A rank that never ends its line must not fill our memory.
            let read = (&mut lines).take(64 * 1024).read_until(b'\n', &mut line);
            match read {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            to.write(&line);
        }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_line_is_prefixed_and_the_last_is_ended() {
        let shared = Shared::default();
        let text: &[u8] = b"one\n\ntwo \xff\nlast";
        forward(text, 3, Prefix { color: false }, Sink::new(shared.clone())).join().unwrap();
        assert_eq!(*shared.0.lock().unwrap(), b"[rank 3] one\n[rank 3] \n[rank 3] two \xff\n[rank 3] last\n");
    }

    #[test]
    fn color_is_around_the_prefix_alone() {
        assert_eq!(Prefix { color: true }.of(0), b"\x1b[36m[rank 0]\x1b[0m ");
    }
}
