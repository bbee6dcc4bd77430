//! What each rank of this process is at, and what it leaves behind when the run goes wrong.
//!
//! A record is written when the rank fails, when it learns that another has failed, and when the process is told to end.
//! None of that is up to the rank's own thread, which may stand in a collective, in the data loader or in native code: the
//! second is done by the thread of `comm::processes` that looks out for failures, the third by one that waits for signals.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use ferrotitan_comm::{DeviceMesh, Event, Failure, processes::OnFailure};
use ferrotitan_mesh::{Dim, Mesh as _};
use ferrotitan_telemetry::report::{self, Cause, Dump, End, Ends, Reason, Report};
use ferrotitan_telemetry::trace::Clock;
use ferrotitan_telemetry::tui::{RankState, View};
use ferrotitan_telemetry::{CollectiveRecord, Coordinate, Place};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

pub use ferrotitan_telemetry::report::Phase;

use crate::launch::RankEnd;
use crate::plan::CommPlan;

/// How long rank threads may take to end once one has failed.
const GRACE: Duration = Duration::from_secs(5);

/// How many of a rank's last collectives its record holds.
const COLLECTIVES: usize = 1000;

/// The ranks of this process.
#[derive(Clone, Debug)]
pub struct Watch(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    plan: CommPlan,
    clock: Clock,
    ranks: Mutex<BTreeMap<usize, Seat>>,
    view: OnceLock<View>,
}

/// One rank.
#[derive(Debug)]
struct Seat {
    mesh: DeviceMesh,
    phase: Phase,
    since: Instant,
    step: u64,
    /// Whether its record is written.
    left: bool,
}

impl Seat {
    /// As a live view shows it.
    fn shown(&self) -> RankState {
        let along = |at: &Coordinate| format!("{} {}", at.dimension, at.index);
        let place: Vec<String> = place(&self.mesh).coordinates.iter().map(along).collect();
        let last = self.mesh.recorder().last();
        let collective = last.map(|event| format!("{} #{} on {}", event.op, event.sequence, event.group));
        RankState {
            place: place.join(", "),
            step: self.step,
            phase: self.phase,
            collective: collective.unwrap_or_default(),
        }
    }

    /// Why it failed. The recorder knows, where the error that came to the top may have come through libtorch.
    fn reason(&self) -> Reason {
        let failure = self.mesh.recorder().events().iter().rev().find_map(|event| event.failed);
        match failure {
            None => Reason::Failed,
            Some(Failure::Timeout) => Reason::TimedOut,
            Some(Failure::Mismatch) => Reason::Mismatched,
            Some(Failure::PeerFailed) => Reason::PeerFailed,
            Some(Failure::Other) => Reason::CollectiveFailed,
        }
    }
}

impl Watch {
    /// None yet. What an earlier run left in the folder goes, where this process is the `first` of the run.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn new(plan: &CommPlan, first: bool) -> anyhow::Result<Self> {
        if first {
            report::clear(&plan.records, &plan.record_prefix)?;
        }
        Ok(Watch(Arc::new(Shared {
            plan: plan.clone(),
            clock: Clock::unix(),
            ranks: Mutex::default(),
            view: OnceLock::new(),
        })))
    }

    /// What ranks are at is shown in a live view, too.
    pub(super) fn shown(self, view: Option<&View>) -> Self {
        if let Some(view) = view {
            // It is the first.
            let _ = self.0.view.set(view.clone());
        }
        self
    }

    /// Watches a rank until the returned value goes.
    pub fn join(&self, mesh: &DeviceMesh) -> Rank {
        let rank = mesh.rank();
        let seat = Seat { mesh: mesh.clone(), phase: Phase::Start, since: Instant::now(), step: 0, left: false };
        self.0.ranks().insert(rank, seat);
        Rank { watch: self.clone(), rank }
    }

    /// Writes the records of all ranks when another process' rank fails.
    pub fn on_failure(&self) -> OnFailure {
        // Weakly: what it is given to lives in the meshes that are watched.
        let shared: Weak<Shared> = Arc::downgrade(&self.0);
        OnFailure::new(move |rank, reason| {
            if let Some(shared) = shared.upgrade() {
                shared.leave(None, &format!("rank {rank} has failed: {reason}"));
            }
        })
    }

    /// Writes the records of all ranks when this process is told to end, and then ends it as it would have without.
    pub fn on_signals(&self) {
        let shared = Arc::downgrade(&self.0);
        let wait = move |mut signals: Signals| {
            for signal in signals.forever() {
                if let Some(shared) = shared.upgrade() {
                    shared.leave(None, "it was told to end");
                }
                let _ = emulate_default_handler(signal);
            }
        };
        match Signals::new([SIGINT, SIGTERM, SIGHUP]) {
            Ok(signals) => drop(thread::spawn(move || wait(signals))),
            Err(error) => tracing::warn!("ranks that are told to end will leave no record: {error}"),
        }
    }

    /// Ends this process with the report, if it is still there after the grace: a thread that stands still cannot be ended
    /// alone.
    pub(super) fn end_soon(&self) {
        let shared = Arc::downgrade(&self.0);
        thread::spawn(move || {
            thread::sleep(GRACE);
            if let Some(shared) = shared.upgrade() {
                let report = conclude(&shared.plan, &[], 0).unwrap_or_default();
                tracing::error!("{report}\nranks of this process do not end by themselves, so the process is ended");
                // Not `exit`: it would run destructors of libtorch while other threads still compute, and may hang.
                let _ = kill(Pid::this(), Signal::SIGKILL);
            }
        });
    }

    /// What the records of this run come to, printed by whoever shows it; also written beside them. `None` where they tell
    /// no more than the error of the run.
    pub fn report(&self) -> Option<String> {
        conclude(&self.0.plan, &[], 0)
    }
}

/// Writes down how the ranks of this machine ended, and what all records come to; gives it in words. `None` where they
/// tell no more than the errors of the ranks.
pub fn conclude(plan: &CommPlan, ends: &[RankEnd], world_size: usize) -> Option<String> {
    let end = |end: &RankEnd| {
        let how = end.death.map_or_else(|| "ended well".to_owned(), |death| death.to_string());
        let by_signal = matches!(end.death, Some(crate::launch::Death::Signal(_)));
        (end.rank, End { how, well: end.death.is_none(), by_signal, told: end.told })
    };
    let found = || -> ferrotitan_telemetry::Result<Report> {
        if !ends.is_empty() {
            Ends { world_size, ranks: ends.iter().map(end).collect() }.write(&plan.records)?;
        }
        read(&plan.records)
    };
    match found() {
        Ok(report) => {
            if let Err(error) = report.write(&plan.records) {
                tracing::warn!("the report stands here alone: {error}");
            }
            let more = report.findings.iter().any(|finding| finding.cause != Cause::Failed);
            more.then(|| format!("{report}records: {}", plan.records.display()))
        }
        Err(error) => {
            tracing::debug!("there is no report: {error}");
            None
        }
    }
}

/// What the records of a folder come to.
///
/// # Errors
/// When it has none.
pub fn read(folder: &Path) -> ferrotitan_telemetry::Result<Report> {
    Ok(report::analyse(&report::read_folder(folder)?))
}

/// One rank, being watched.
#[derive(Debug)]
pub struct Rank {
    watch: Watch,
    rank: usize,
}

impl Rank {
    /// Says what it is at from now on.
    pub fn at(&self, phase: Phase) {
        if let Some(seat) = self.watch.0.ranks().get_mut(&self.rank) {
            (seat.phase, seat.since) = (phase, Instant::now());
            if let Some(view) = self.watch.0.view.get() {
                view.rank(self.rank, seat.shown());
            }
        }
    }

    /// Says at which step it is.
    pub fn step(&self, step: u64) {
        if let Some(seat) = self.watch.0.ranks().get_mut(&self.rank) {
            seat.step = step;
        }
    }

    /// Writes the records of all ranks of this process: this one has failed, for this reason.
    pub fn failed(&self, error: &str) {
        self.watch.0.leave(Some(self.rank), error);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if thread::panicking() {
            self.failed("it panicked");
        }
        self.watch.0.ranks().remove(&self.rank);
    }
}

impl Shared {
    fn ranks(&self) -> MutexGuard<'_, BTreeMap<usize, Seat>> {
        // Consistent between statements.
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the records of all ranks that have none yet: `failed` has failed, or else something happened elsewhere.
    fn leave(&self, failed: Option<usize>, words: &str) {
        for (&rank, seat) in self.ranks().iter_mut().filter(|(_, seat)| !seat.left) {
            seat.left = true;
            let (reason, error) = match failed {
                Some(failed) if failed == rank => (seat.reason(), words.to_owned()),
                Some(failed) => (Reason::Told, format!("rank {failed} has failed: {words}")),
                None => (Reason::Told, words.to_owned()),
            };
            let path = self.plan.records.join(format!("{}{rank}.json", self.plan.record_prefix));
            if let Err(error) = self.dump(seat, reason, error).write(&path) {
                tracing::warn!("rank {rank} leaves no record: {error}");
            }
        }
    }

    fn dump(&self, seat: &Seat, reason: Reason, error: String) -> Dump {
        let events = seat.mesh.recorder().events();
        let last = events.len().saturating_sub(COLLECTIVES);
        Dump {
            place: place(&seat.mesh),
            reason,
            error: Some(error),
            written: self.clock.now(),
            phase: seat.phase,
            phase_since: self.clock.at(seat.since),
            step: seat.step,
            entered: seat.mesh.groups().into_iter().map(|(name, group)| (name, group.entered())).collect(),
            collectives: events[last..].iter().map(|event| record(event, &self.clock)).collect(),
        }
    }
}

/// The place of a rank, as plain data.
pub fn place(mesh: &DeviceMesh) -> Place {
    let degrees = mesh.degrees();
    let along = |dim: &Dim| Coordinate {
        dimension: dim.name().to_owned(),
        index: mesh.coordinate(*dim),
        size: degrees.get(*dim),
    };
    Place {
        rank: mesh.rank(),
        world_size: mesh.world_size(),
        coordinates: Dim::ALL.iter().filter(|dim| degrees.get(**dim) > 1).map(along).collect(),
        groups: mesh.groups().into_iter().map(|(name, group)| (name, group.ranks().to_vec())).collect(),
    }
}

/// What the recorder knows of a collective, as plain data on a clock.
pub fn record(event: &Event, clock: &Clock) -> CollectiveRecord {
    CollectiveRecord {
        sequence: event.sequence,
        group: event.group.to_string(),
        op: event.op.name().to_owned(),
        peer: event.peer,
        shape: event.shape.clone(),
        dtype: format!("{:?}", event.kind),
        call: event.signature(),
        bytes: event.bytes,
        issued: clock.at(event.issued),
        waited: event.waited.map(|moment| clock.at(moment)),
        finished: event.finished.map(|moment| clock.at(moment)),
        dropped: event.dropped,
        failed: event.failed.is_some(),
    }
}
