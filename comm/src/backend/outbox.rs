//! Messages that have been sent and not yet received, kept alive until they are.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use ferrotitan_ext::process_group::Work;

/// How long a rank that ends waits for its last messages to be received.
const LINGER: Duration = Duration::from_secs(30);

/// Sends that nobody waits for.
#[derive(Debug)]
pub(super) enum Outbox {
    /// Waits on a thread of its own, which exists once there is something to wait for: Gloo says that a send is done
    /// only to whoever waits for it, and drops the message of one that nobody holds.
    Waiting(Mutex<Option<Waiter>>),
    /// Looks, at every send, which of the earlier ones are done: a wait would be one of the CUDA stream.
    Looking(Mutex<Vec<Vec<Work>>>),
}

#[derive(Debug)]
pub(super) struct Waiter {
    works: Sender<Vec<Work>>,
    /// Disconnected once the thread has ended.
    ended: Receiver<()>,
}

impl Outbox {
    /// An empty one; `waits` where a work must be waited for to know that it is done.
    pub(super) fn new(waits: bool) -> Self {
        if waits { Outbox::Waiting(Mutex::default()) } else { Outbox::Looking(Mutex::default()) }
    }

    /// Keeps the works of one send until they are done.
    pub(super) fn post(&self, works: Vec<Work>) {
        let waiter = match self {
            Outbox::Waiting(waiter) => waiter,
            Outbox::Looking(under_way) => {
                let mut under_way = under_way.lock().unwrap_or_else(PoisonError::into_inner);
                under_way.retain(|works| !works.iter().all(Work::is_completed));
                under_way.push(works);
                return;
            }
        };
        let mut waiter = waiter.lock().unwrap_or_else(PoisonError::into_inner);
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
        let Outbox::Waiting(waiter) = self else { return };
        let waiter = waiter.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Waiter { works, ended }) = waiter else { return };
        drop(works);
        if !thread::panicking() && ended.recv_timeout(LINGER) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("messages were still not received {} s after the end", LINGER.as_secs());
        }
    }
}
