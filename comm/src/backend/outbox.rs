//! Messages that have been sent and not yet received, kept alive until they are.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use ferrotitan_ext::process_group::Work;

/// How long a rank that ends waits for its last messages to be received.
const LINGER: Duration = Duration::from_secs(30);

/// Waits for sends on a thread of its own, which exists once there is something to wait for: Gloo says that a send is
/// done only to whoever waits for it, and drops the message of one that nobody holds.
#[derive(Debug, Default)]
pub(super) struct Outbox(Mutex<Option<Waiter>>);

#[derive(Debug)]
struct Waiter {
    works: Sender<Vec<Work>>,
    /// Disconnected once the thread has ended.
    ended: Receiver<()>,
}

impl Outbox {
    pub(super) fn post(&self, works: Vec<Work>) {
        let mut waiter = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let works = match &*waiter {
            Some(waiter) => match waiter.works.send(works) {
                Ok(()) => return,
                Err(mpsc::SendError(works)) => works,
            },
            None => works,
        };
        let started = Waiter::start();
        match started.works.send(works) {
            Ok(()) => *waiter = Some(started),
            // No thread could be started: wait here, late rather than never.
            Err(mpsc::SendError(works)) => wait(&works),
        }
    }
}

impl Waiter {
    fn start() -> Self {
        let (works, posted) = mpsc::channel::<Vec<Work>>();
        let (end, ended) = mpsc::channel();
        let body = move || {
            let _end: Sender<()> = end;
            posted.iter().for_each(|works| wait(&works));
        };
        // When this fails the closure is dropped, and with it the receiver, so that `send` fails.
        let _detached = thread::Builder::new().name("outbox".to_owned()).spawn(body);
        Waiter { works, ended }
    }
}

fn wait(works: &[Work]) {
    for work in works {
        if let Err(error) = work.wait(None) {
            tracing::warn!("a message was not received: {error}");
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let waiter = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Waiter { works, ended }) = waiter else { return };
        drop(works);
        if !thread::panicking() && ended.recv_timeout(LINGER) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("messages were still not received {} s after the end", LINGER.as_secs());
        }
    }
}
