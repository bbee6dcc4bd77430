//! c10d process groups: Gloo on the CPU, NCCL on CUDA.
//!
//! All ranks of a group call the same collectives in the same order, with tensors of the same kind and of shapes that
//! fit together. Nothing here checks that over ranks, and Gloo ends the whole process in which more arrives than was
//! expected; who cannot be sure compares shapes first.
//!
//! A call starts the operation and gives a [`Work`] to wait for; tensors are contiguous, and are not touched until
//! then. What a collective writes does not count as an in-place change to autograd. `Float8` and `Bool` tensors can be
//! moved, not reduced.

mod collectives;
mod work;

pub use work::Work;

use std::ffi::{CString, c_int};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::ffi::{self, RawGroup};
use crate::store::Store;
use crate::{Error, Result};

/// How elements of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their product.
    Product,
    /// The least.
    Min,
    /// The greatest.
    Max,
}

impl ReduceOp {
    /// The number that `c10d::ReduceOp` is built from in the shim.
    fn code(self) -> c_int {
        match self {
            Self::Sum => 0,
            Self::Product => 1,
            Self::Min => 2,
            Self::Max => 3,
        }
    }
}

/// How a Gloo group connects.
#[derive(Debug, Clone)]
pub struct GlooOptions {
    /// How long the group waits for all ranks when it is made, and each operation for its peers. A peer that connects
    /// later than this fails the group.
    pub timeout: Duration,
    /// The network interface to listen on, such as `eth0`. Goes before `hostname`.
    pub interface: Option<String>,
    /// The name or address of this machine, under which others reach it. When neither is given: 127.0.0.1 where the
    /// store is on the loopback address or in memory, else what this machine's name resolves to.
    pub hostname: Option<String>,
}

impl Default for GlooOptions {
    /// Ten minutes, and the address found as told above.
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), interface: None, hostname: None }
    }
}

/// How an NCCL group runs.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// How long an operation may take before NCCL's watchdog ends the process.
    pub timeout: Duration,
    /// Whether its kernels go to a high-priority stream.
    pub high_priority: bool,
}

impl Default for NcclOptions {
    /// Ten minutes, normal priority.
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), high_priority: false }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    Gloo,
    Nccl,
}

/// One rank's part in a group of ranks.
///
/// Calls from several threads are started one after the other; that all ranks agree on the order is for the caller to
/// see to. Dropping a Gloo group waits for operations under way, for at most their timeout.
pub struct ProcessGroup {
    raw: *mut RawGroup,
    backend: Backend,
    rank: usize,
    size: usize,
    timeout: Duration,
    /// Held while an operation starts: c10d counts operations without a lock.
    starting: Mutex<()>,
}

// SAFETY: a backend may be used from any thread so long as operations start one at a time, which `starting` sees to.
unsafe impl Send for ProcessGroup {}
// SAFETY: as above; `abort` is made to be called while another thread waits.
unsafe impl Sync for ProcessGroup {}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        // SAFETY: ours alone, freed once; works keep what they need of it.
        unsafe { ffi::ft_group_free(self.raw) };
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("backend", &self.backend)
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// Whether [`ProcessGroup::nccl`] can work here; else why not.
///
/// # Errors
/// What this build or this machine lacks, in words.
pub fn nccl_available() -> Result<(), String> {
    crate::cuda::load();
    // SAFETY: no preconditions; the string is ours.
    match ffi::take_string(unsafe { ffi::ft_nccl_missing() }) {
        None => Ok(()),
        Some(why) => Err(why),
    }
}

impl ProcessGroup {
    /// Joins a Gloo group of `size` ranks as `rank`. Returns once all ranks have come.
    ///
    /// Groups that share a store need a [`Store::prefix`] each.
    ///
    /// # Errors
    /// [`Error::Timeout`] when not all ranks come in time; [`Error::Torch`] when the address cannot be used.
    pub fn gloo(store: &Store, rank: usize, size: usize, options: &GlooOptions) -> Result<Self> {
        const OP: &str = "gloo group";
        let (raw_rank, raw_size) = rank_and_size(OP, rank, size)?;
        let text = |value: Option<&str>| {
            value
                .map(CString::new)
                .transpose()
                .map_err(|_| Error::argument(OP, "the interface or hostname contains a nul byte"))
        };
        let interface = text(options.interface.as_deref())?;
        let hostname = match (&interface, options.hostname.as_deref()) {
            (Some(_), _) => None,
            (None, None) if store.is_loopback() => text(Some("127.0.0.1"))?,
            (None, hostname) => text(hostname)?,
        };
        let pointer = |text: &Option<CString>| text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr());
        let mut raw = std::ptr::null_mut();
        ffi::call(OP, |failure| {
            // SAFETY: the store is live, the strings are null or nul-terminated, `raw` takes the new handle.
            unsafe {
                ffi::ft_group_gloo(
                    store.raw(),
                    raw_rank,
                    raw_size,
                    ffi::milliseconds(options.timeout),
                    pointer(&interface),
                    pointer(&hostname),
                    failure,
                    &raw mut raw,
                )
            }
        })?;
        Ok(Self { raw, backend: Backend::Gloo, rank, size, timeout: options.timeout, starting: Mutex::new(()) })
    }

    /// Joins an NCCL group of `size` ranks as `rank`, on the current CUDA device. The ranks connect at the first
    /// operation.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where [`nccl_available`] says no; [`Error::Torch`] when NCCL fails.
    pub fn nccl(store: &Store, rank: usize, size: usize, options: &NcclOptions) -> Result<Self> {
        const OP: &str = "nccl group";
        nccl_available().map_err(|why| Error::Unsupported { what: "nccl", why })?;
        let (raw_rank, raw_size) = rank_and_size(OP, rank, size)?;
        let mut raw = std::ptr::null_mut();
        ffi::call(OP, |failure| {
            // SAFETY: the store is live, `raw` takes the new handle.
            unsafe {
                ffi::ft_group_nccl(
                    store.raw(),
                    raw_rank,
                    raw_size,
                    ffi::milliseconds(options.timeout),
                    options.high_priority,
                    failure,
                    &raw mut raw,
                )
            }
        })?;
        Ok(Self { raw, backend: Backend::Nccl, rank, size, timeout: options.timeout, starting: Mutex::new(()) })
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The timeout of each operation.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// `gloo` or `nccl`.
    pub fn backend(&self) -> &'static str {
        match self.backend {
            Backend::Gloo => "gloo",
            Backend::Nccl => "nccl",
        }
    }

    /// Breaks the connections to all peers. Whoever waits in this group, here or on another rank, gets an error; the
    /// group is of no use afterwards.
    ///
    /// # Errors
    /// [`Error::Torch`] when NCCL fails to abort.
    pub fn abort(&self) -> Result<()> {
        // Starting an operation of Gloo's never blocks, and its abort is one; NCCL's may have to end one that does.
        let _one_at_a_time = (self.backend == Backend::Gloo).then(|| self.lock());
        // SAFETY: the group is live.
        ffi::call("abort", |failure| unsafe { ffi::ft_group_abort(self.raw, failure) })
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn rank_and_size(op: &'static str, rank: usize, size: usize) -> Result<(i32, i32)> {
    match (i32::try_from(rank), i32::try_from(size)) {
        (Ok(raw_rank), Ok(raw_size)) if rank < size => Ok((raw_rank, raw_size)),
        _ => Err(Error::argument(op, format!("no rank {rank} in a group of {size}; ranks count from 0"))),
    }
}
