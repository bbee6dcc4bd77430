//! Saving: who writes what, and when a step exists.

mod commit;
mod plan;
mod purge;
mod write;

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ferrotitan_comm::DeviceMesh;
use ferrotitan_ext::cuda;
use ferrotitan_mesh::{Layout, Mesh as _};
use tch::{Device, Tensor};

pub(crate) use self::plan::check;
use self::plan::{Plan, Shard};
use self::write::Job;
pub(crate) use self::write::{Sums, dotted, view};
use crate::agree::agree;
use crate::checkpoint::folder;
use crate::manifest::{Presence, presence};
use crate::{Error, Result, Store};

/// A named global tensor, of which this rank holds the shard that the layout says.
#[derive(Debug)]
pub struct Item {
    /// The name, the same on all ranks, and no other item's.
    pub name: String,
    /// How the global tensor lies on the mesh.
    pub layout: Layout,
    /// What this rank holds of it, of the shape [`Layout::local_shape`]. It is read, or loaded into, in place.
    pub tensor: Tensor,
}

impl Item {
    /// An item of these fields.
    pub fn new(name: impl Into<String>, layout: Layout, tensor: Tensor) -> Self {
        Item { name: name.into(), layout, tensor }
    }
}

/// Whether training waits for a save to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// [`Saver::save`] returns when the step exists.
    #[default]
    Sync,
    /// [`Saver::save`] returns when the shards are copied to memory of the saver: as much as this rank owns. Writing
    /// goes on behind.
    Async,
}

/// How steps are saved.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Whether training waits.
    pub mode: Mode,
    /// How many steps stay: once a step is saved, all others are deleted except the latest. At least the one just saved
    /// stays; 0 means all.
    pub keep_latest_k: usize,
    /// The most bytes of tensors in one file. Larger tensors are cut.
    pub file_bytes: usize,
    /// How long rank 0, done with its own part, waits for the parts of the others.
    pub patience: Duration,
}

impl Default for SaveOptions {
    fn default() -> Self {
        let patience = Duration::from_secs(300);
        SaveOptions { mode: Mode::Sync, keep_latest_k: 0, file_bytes: 512 << 20, patience }
    }
}

/// What a save took on this rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// The step.
    pub step: u64,
    /// How long [`Saver::save`] kept its caller: in [`Mode::Sync`], until the step was there.
    pub stall: Duration,
    /// The part of it that was spent waiting for the save before.
    pub waited: Duration,
    /// The part of it that was spent copying.
    pub copy: Duration,
    /// How long this rank wrote.
    pub write: Duration,
    /// On rank 0: how long it then took until all ranks were done and the step was there.
    pub commit: Duration,
    /// The bytes of tensors that this rank wrote.
    pub bytes: u64,
    /// The files that it wrote.
    pub files: usize,
}

/// Saves steps, one after the other. Every rank of the mesh has one, and all call the same functions in the same order.
///
/// Dropping it waits for this rank's part of a save that is under way, and on rank 0 for the others'; a panicking rank
/// gives it up instead.
#[derive(Debug)]
pub struct Saver {
    store: Store,
    mesh: DeviceMesh,
    options: SaveOptions,
    /// Copies of shards, by tensor, that serve from save to save.
    staging: HashMap<String, Tensor>,
    flight: Option<Flight>,
    /// What works on after its step is there.
    purging: Option<JoinHandle<()>>,
}

/// A save under way.
#[derive(Debug)]
struct Flight {
    step: u64,
    outcome: Receiver<Result<Stats>>,
    thread: JoinHandle<()>,
    given_up: Arc<AtomicBool>,
    /// What the calling thread knows of it.
    stats: Stats,
}

impl Saver {
    /// Saves into the folder that `store` is.
    pub fn new(store: Store, mesh: DeviceMesh, options: SaveOptions) -> Self {
        Saver { store, mesh, options, staging: HashMap::new(), flight: None, purging: None }
    }

    /// Saves a step: every item's elements once, by the rank that owns them ([`Layout::is_owner`]), and `state`, which
    /// rank 0 gives. An item is given by every rank whose stage holds it.
    ///
    /// Waits for the save before it first. Gives what it learns of the end of: in [`Mode::Sync`] this save, in
    /// [`Mode::Async`] the one before, if any.
    ///
    /// # Errors
    /// [`Error::NotSaved`] when this save, or the one before, has failed on any rank; all ranks get the error. If it is
    /// the one before, this one has not begun and may be tried again. [`Error::StepExists`]; [`Error::Item`].
    pub fn save(
        &mut self,
        step: u64,
        items: impl IntoIterator<Item = Item>,
        state: serde_json::Value,
    ) -> Result<Option<Stats>> {
        let begun = Instant::now();
        let before = self.wait()?;
        let waited = begun.elapsed();
        let planned = Plan::new(items, &self.mesh, self.options.file_bytes).and_then(|plan| {
            let attempt = if self.mesh.rank() == 0 { self.begin(step)? } else { String::new() };
            Ok((plan, attempt))
        });
        let (planned, attempts) = match planned {
            Ok((plan, attempt)) => (Some(plan), agree(&self.mesh.world(), Ok(attempt))?),
            Err(error) => (None, agree(&self.mesh.world(), Err(error))?),
        };
        let (Some(mut plan), Some(attempt)) = (planned, attempts.into_iter().next()) else { return Ok(before) };

        let copying = Instant::now();
        let staged = match self.options.mode {
            Mode::Sync => cuda::synchronize(self.mesh.device()).map_err(Error::from),
            Mode::Async => self.stage(&mut plan),
        };
        let mut stats = Stats { step, waited, bytes: plan.bytes, files: plan.files.len(), ..Stats::default() };
        stats.copy = copying.elapsed();
        let given_up = Arc::new(AtomicBool::new(false));
        let job = Job {
            store: self.store.clone(),
            step,
            attempt,
            rank: self.mesh.rank(),
            world_size: self.mesh.world_size(),
            options: self.options.clone(),
            state,
            given_up: given_up.clone(),
        };
        let (tell, outcome) = sync_channel(1);
        let purging = self.purging.take();
        let work = move || {
            // Two threads that delete the same would disturb each other.
            join(purging);
            let done = staged.and_then(|()| job.run(plan, stats));
            if let Err(error) = &done {
                job.leave_note(error);
            }
            let saved = done.is_ok();
            // Nobody listens when the saver is gone.
            let _ = tell.send(done);
            if saved && job.rank == 0 {
                purge::keep_latest(&job.store, job.step, job.options.keep_latest_k);
            }
        };
        let thread = thread::Builder::new().name(format!("save {step}")).spawn(work);
        let thread = thread.map_err(|error| Error::Thread { thread: "saving", reason: error.to_string() })?;
        stats.stall = begun.elapsed();
        self.flight = Some(Flight { step, outcome, thread, given_up, stats });
        match self.options.mode {
            Mode::Async => Ok(before),
            Mode::Sync => {
                let mut done = self.wait()?;
                if let Some(stats) = &mut done {
                    stats.stall = begun.elapsed();
                }
                Ok(done)
            }
        }
    }

    /// Waits until the save under way, if any, has come to its end on all ranks.
    ///
    /// # Errors
    /// [`Error::NotSaved`], on all ranks when any has failed.
    pub fn wait(&mut self) -> Result<Option<Stats>> {
        let Some(Flight { step, outcome, thread, stats, .. }) = self.flight.take() else { return Ok(None) };
        if self.options.mode == Mode::Async && !thread.is_finished() {
            tracing::info!(step, "waiting for the save under way");
        }
        let ended = Error::Thread { thread: "saving", reason: "it ended without a result".to_owned() };
        let done = outcome.recv().unwrap_or(Err(ended));
        self.purging = Some(thread);
        let failed = |source| Error::NotSaved { step, source: Box::new(source) };
        let (mine, told) = match done {
            Ok(done) => (Some(done), Ok(String::new())),
            Err(error) => (None, Err(error)),
        };
        agree(&self.mesh.world(), told).map_err(failed)?;
        Ok(mine.map(|done| Stats { stall: stats.stall, ..done }))
    }

    /// Waits for the save under way and for the deletion of old steps.
    ///
    /// # Errors
    /// As [`Saver::wait`].
    pub fn finish(mut self) -> Result<Option<Stats>> {
        let done = self.wait();
        join(self.purging.take());
        done
    }

    /// Refuses a step that exists; else gives a name to this attempt at it, which no other has.
    fn begin(&self, step: u64) -> Result<String> {
        if presence(&self.store.below(&folder(step)))? == Presence::There {
            return Err(Error::StepExists { step, address: self.store.to_string() });
        }
        // The standard library seeds its hash maps at random.
        let random = || RandomState::new().build_hasher().finish();
        Ok(format!("{:016x}", random()))
    }

    /// Copies the shards, so that the originals may change.
    fn stage(&mut self, plan: &mut Plan) -> Result<()> {
        let names: HashSet<&String> = plan.shards.iter().map(|shard| &shard.name).collect();
        self.staging.retain(|name, _| names.contains(name));
        for Shard { name, tensor, .. } in &mut plan.shards {
            let tensor_now = tensor.f_detach()?;
            let fits = |copy: &Tensor| copy.size() == tensor_now.size() && copy.kind() == tensor_now.kind();
            let mut copy = match self.staging.remove(name).filter(fits) {
                Some(copy) => copy,
                None => {
                    let empty = Tensor::f_empty(tensor_now.size(), (tensor_now.f_kind()?, Device::Cpu))?;
                    if tensor_now.device().is_cuda() { empty.f_pin_memory(tensor_now.device())? } else { empty }
                }
            };
            copy.f_copy_(&tensor_now)?;
            *tensor = copy.shallow_clone();
            self.staging.insert(name.clone(), copy);
        }
        Ok(())
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            if thread::panicking() {
                flight.given_up.store(true, Ordering::Relaxed);
            } else {
                tracing::info!(step = flight.step, "waiting for the save under way");
            }
            join(Some(flight.thread));
        }
        join(self.purging.take());
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    if let Some(thread) = thread {
        // It returns nothing, and a panic in it has been told of.
        let _ = thread.join();
    }
}

/// Saves one step and waits until it is there: [`Saver`] in [`Mode::Sync`], once.
///
/// # Errors
/// As [`Saver::save`].
pub fn save(
    store: &Store,
    mesh: &DeviceMesh,
    step: u64,
    items: impl IntoIterator<Item = Item>,
    state: serde_json::Value,
) -> Result<Stats> {
    let mut saver = Saver::new(store.clone(), mesh.clone(), SaveOptions::default());
    Ok(saver.save(step, items, state)?.unwrap_or_default())
}
