//! How rank processes learn that one of them has failed.
//!
//! The first rank that fails leaves word in the store. A thread of every other rank looks for it, and breaks the rank's
//! connections when it is there, so that whatever the rank waits for ends at once. Connections alone would not do: a
//! rank may wait for one that is well and waits itself for the one that failed.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ferrotitan_ext::process_group::ProcessGroup;
use ferrotitan_ext::store::Store;

use super::processes::OnFailure;

/// How often to look.
const INTERVAL: Duration = Duration::from_millis(250);

/// How long to wait for an answer of the store where only an error message, or a farewell, depends on it.
const PATIENCE: Duration = Duration::from_secs(3);

/// The key under which the first rank that fails says so.
const FAILED: &str = "failed";

/// One rank's look-out.
#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    rank: usize,
    on_failure: Option<OnFailure>,
    state: Mutex<State>,
    stopped: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Which rank failed, and why.
    failed: Option<(usize, String)>,
    groups: Vec<Weak<ProcessGroup>>,
    stop: bool,
}

impl Watch {
    /// Looks out, as `rank`, for failures among the ranks of a store.
    pub(super) fn new(store: Store, rank: usize, on_failure: Option<OnFailure>) -> Self {
        let shared = Arc::new(Shared { store, rank, on_failure, state: Mutex::default(), stopped: Condvar::new() });
        let looking = shared.clone();
        let thread = thread::Builder::new().name("watch".to_owned()).spawn(move || looking.look_out());
        if let Err(error) = &thread {
            tracing::warn!("failures of other ranks will be noticed late: {error}");
        }
        Watch { shared, thread: thread.ok() }
    }

    pub(super) fn store(&self) -> &Store {
        &self.shared.store
    }

    /// Breaks this group's connections too when a rank fails.
    pub(super) fn add(&self, group: &Arc<ProcessGroup>) {
        let mut state = self.shared.lock();
        state.groups.push(Arc::downgrade(group));
        if state.failed.is_some() {
            abort(&mut state);
        }
    }

    /// Which rank has failed, and why, as far as this rank knows.
    pub(super) fn failed(&self) -> Option<(usize, String)> {
        self.shared.lock().failed.clone()
    }

    /// The same, after waiting for the word until `patience` ends.
    pub(super) fn ask(&self, patience: Duration) -> Option<(usize, String)> {
        let shared = Arc::clone(&self.shared);
        let end = Instant::now() + patience;
        let asked = within(patience + PATIENCE, move || {
            loop {
                let failed = shared.lock().failed.clone();
                if let Some(failed) = failed.or_else(|| word(&shared.store)) {
                    return Some(failed);
                }
                if Instant::now() >= end {
                    return None;
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        asked.flatten()
    }

    /// Leaves word that `rank`, which is this one, has failed, unless another was first; breaks its connections.
    pub(super) fn announce(&self, rank: usize, reason: &str) {
        let (store, word) = (self.shared.store.clone(), format!("{rank}\n{reason}"));
        let told = within(PATIENCE, move || {
            let first = store.add("failures", 1).is_ok_and(|count| count == 1);
            if first { store.set(FAILED, word.as_bytes()) } else { Ok(()) }
        });
        match told {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::debug!("the other ranks could not be told of the failure: {error}"),
            None => tracing::debug!("the other ranks could not be told of the failure: the store does not answer"),
        }
        let mut state = self.shared.lock();
        state.failed.get_or_insert_with(|| (rank, reason.to_owned()));
        abort(&mut state);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that panics runs while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_out(&self) {
        let mut state = self.lock();
        while !state.stop && state.failed.is_none() {
            state = self.stopped.wait_timeout(state, INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
            drop(state);
            let word = word(&self.store);
            if let (Some((rank, reason)), Some(on_failure)) = (&word, &self.on_failure)
                && *rank != self.rank
            {
                // Before the waits end that show what this rank waited for.
                on_failure.tell(*rank, reason);
            }
            state = self.lock();
            if let Some(word) = word
                && state.failed.is_none()
            {
                state.failed = Some(word);
                abort(&mut state);
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.stopped.notify_all();
        if let Some(thread) = self.thread.take() {
            // It does not panic, and if it had there would be nothing to do about it. Where the store does not answer, it
            // is left behind.
            within(PATIENCE, move || thread.join());
        }
    }
}

/// Does something with the store on a thread of its own, and gives up on it when `patience` ends: a store whose process
/// stands still answers nobody, and a call to it cannot be ended.
pub(super) fn within<T: Send + 'static>(patience: Duration, ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    let asking = move || {
        // Whoever asked may have given up.
        let _ = sender.send(ask());
    };
    thread::Builder::new().name("store".to_owned()).spawn(asking).ok()?;
    receiver.recv_timeout(patience).ok()
}

/// Ends all waiting in the groups.
fn abort(state: &mut State) {
    for group in state.groups.drain(..).filter_map(|group| group.upgrade()) {
        if let Err(error) = group.abort() {
            tracing::debug!("a group could not be aborted: {error}");
        }
    }
}

/// The word of the first rank that failed. A store that is gone, with rank 0, has none.
pub(super) fn word(store: &Store) -> Option<(usize, String)> {
    if !store.check(FAILED).ok()? {
        return None;
    }
    let word = String::from_utf8(store.get(FAILED).ok()?).ok()?;
    let (rank, reason) = word.split_once('\n')?;
    Some((rank.parse().ok()?, reason.to_owned()))
}
