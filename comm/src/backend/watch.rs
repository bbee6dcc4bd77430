//! How rank processes learn that one of them has failed.
//!
//! The first rank that fails leaves word in the store. A thread of every other rank looks for it, and breaks the rank's
//! connections when it is there, so that whatever the rank waits for ends at once. Connections alone would not do: a
//! rank may wait for one that is well and waits itself for the one that failed.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ferrotitan_ext::process_group::ProcessGroup;
use ferrotitan_ext::store::Store;

/// How often to look.
const INTERVAL: Duration = Duration::from_millis(250);

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
    /// Looks out for failures among the ranks of a store.
    pub(super) fn new(store: Store) -> Self {
        let shared = Arc::new(Shared { store, state: Mutex::default(), stopped: Condvar::new() });
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
        let end = Instant::now() + patience;
        loop {
            if let Some(failed) = self.failed().or_else(|| word(&self.shared.store)) {
                return Some(failed);
            }
            if Instant::now() >= end {
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Leaves word that `rank`, which is this one, has failed, unless another was first; breaks its connections.
    pub(super) fn announce(&self, rank: usize, reason: &str) {
        let store = &self.shared.store;
        let first = store.add("failures", 1).is_ok_and(|count| count == 1);
        if first && let Err(error) = store.set(FAILED, format!("{rank}\n{reason}").as_bytes()) {
            tracing::debug!("the other ranks could not be told of the failure: {error}");
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
            // It does not panic, and if it had there would be nothing to do about it.
            let _ = thread.join();
        }
    }
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
