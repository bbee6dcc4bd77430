//! c10d process groups: Gloo on the CPU, NCCL on CUDA.
//!
//! All ranks of a group call the same collectives in the same order, with tensors of the same kind and of shapes that
//! fit together. Nothing here checks that over ranks, and Gloo ends the whole process in which more arrives than was
//! expected; who cannot be sure compares shapes first.
//!
//! A call starts the operation and gives a [`Work`] to wait for; tensors are contiguous, and are not touched until then.
//! What a collective writes does not count as an in-place change to autograd. `Float8` and `Bool` tensors can be moved,
//! not reduced.

use std::cell::Cell;
use std::ffi::{CString, c_int};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tch::{Kind, Tensor};

use crate::ffi::{self, Failure, RawGroup, RawWork};
use crate::list::TensorList;
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

/// Codes of `ft_group_collective`.
#[derive(Clone, Copy)]
enum Collective {
    AllReduce = 0,
    AllGatherInto = 1,
    AllGather = 2,
    ReduceScatterFrom = 3,
    ReduceScatter = 4,
    Broadcast = 5,
    Reduce = 6,
    Gather = 7,
    Scatter = 8,
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

    /// Reduces `tensor` over all ranks, in place, on every rank.
    ///
    /// # Errors
    /// As every operation: [`Error::Torch`] or [`Error::Argument`] when the tensors do not fit, here or from
    /// [`Work::wait`]; [`Error::Torch`] when a peer is gone.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        self.collective("all_reduce", Collective::AllReduce, &[tensor], &[], Some(op), 0)
    }

    /// Gathers the ranks' `input`s, all of one shape, into `output`, in the order of ranks: `output` has `size` times
    /// the elements.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn all_gather_into(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        self.collective("all_gather_into", Collective::AllGatherInto, &[output], &[input], None, 0)
    }

    /// Gathers the ranks' `input`s into `outputs`, one for each rank. Shapes may differ from rank to rank.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn all_gather(&self, outputs: &[Tensor], input: &Tensor) -> Result<Work> {
        const OP: &str = "all_gather";
        self.check_count(OP, "outputs", outputs.len())?;
        check_size(OP, "the output of this rank", &outputs[self.rank], "the input", input)?;
        if self.backend == Backend::Nccl || same_sizes(outputs) {
            return self.collective(OP, Collective::AllGather, &refs(outputs), &[input], None, 0);
        }
        // Gloo gathers equal shapes only; every rank's part as a broadcast moves the same bytes.
        overwrite_bytes(&outputs[self.rank], input)?;
        let parts = outputs.iter().enumerate().map(|(root, output)| self.broadcast(output, root));
        Ok(Work::all(OP, parts.collect::<Result<Vec<_>>>()?))
    }

    /// Reduces `input` over all ranks and leaves to each its part: `input` has `size` times the elements of `output`,
    /// in the order of ranks.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn reduce_scatter_from(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Result<Work> {
        self.collective("reduce_scatter_from", Collective::ReduceScatterFrom, &[output], &[input], Some(op), 0)
    }

    /// Reduces `inputs`, one for each rank, and leaves to each rank its own in `output`. Their shapes may differ.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn reduce_scatter(&self, output: &Tensor, inputs: &[Tensor], op: ReduceOp) -> Result<Work> {
        const OP: &str = "reduce_scatter";
        self.check_count(OP, "inputs", inputs.len())?;
        check_size(OP, "the input of this rank", &inputs[self.rank], "the output", output)?;
        if self.backend == Backend::Nccl || same_sizes(inputs) {
            return self.collective(OP, Collective::ReduceScatter, &[output], &refs(inputs), Some(op), 0);
        }
        let mut parts = Vec::with_capacity(inputs.len());
        for (root, input) in inputs.iter().enumerate() {
            // A reduction uses its tensor as scratch on every rank, and inputs stay as they are.
            let scratch = if root == self.rank { output.shallow_clone() } else { torch(OP, input.f_empty_like())? };
            overwrite_bytes(&scratch, input)?;
            parts.push(self.reduce(&scratch, root, op)?);
        }
        Ok(Work::all(OP, parts))
    }

    /// Sends `input_splits[r]` rows of `input` to rank `r`, and receives `output_splits[r]` rows of `output` from it.
    /// Rows are slices along axis 0.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn all_to_all(
        &self,
        output: &Tensor,
        input: &Tensor,
        output_splits: &[i64],
        input_splits: &[i64],
    ) -> Result<Work> {
        const OP: &str = "all_to_all";
        self.check_count(OP, "output splits", output_splits.len())?;
        self.check_count(OP, "input splits", input_splits.len())?;
        self.start(OP, |failure, work| {
            // SAFETY: group and tensors are live; both arrays have `size` elements.
            unsafe {
                ffi::ft_group_all_to_all(
                    self.raw,
                    output.as_ptr(),
                    input.as_ptr(),
                    output_splits.as_ptr(),
                    input_splits.as_ptr(),
                    self.size,
                    failure,
                    work,
                )
            }
        })
    }

    /// Copies `tensor` of rank `root` to `tensor` of all others.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        self.collective("broadcast", Collective::Broadcast, &[tensor], &[], None, root)
    }

    /// Reduces `tensor` over all ranks, in place, on rank `root`; on other ranks its content is undefined afterwards.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn reduce(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<Work> {
        self.collective("reduce", Collective::Reduce, &[tensor], &[], Some(op), root)
    }

    /// Gathers the ranks' `input`s, all of one shape, on rank `root` into `outputs`, one for each rank; empty on other
    /// ranks.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn gather(&self, outputs: &[Tensor], input: &Tensor, root: usize) -> Result<Work> {
        self.check_root_list("gather", "outputs", outputs, root)?;
        self.collective("gather", Collective::Gather, &refs(outputs), &[input], None, root)
    }

    /// Copies to each rank's `output` its own of the `inputs` of rank `root`, all of one shape; empty on other ranks.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn scatter(&self, output: &Tensor, inputs: &[Tensor], root: usize) -> Result<Work> {
        self.check_root_list("scatter", "inputs", inputs, root)?;
        self.collective("scatter", Collective::Scatter, &[output], &refs(inputs), None, root)
    }

    /// Sends `tensor` to rank `peer`. Messages between two ranks with one tag arrive in order; NCCL ignores the tag.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn send(&self, tensor: &Tensor, peer: usize, tag: i32) -> Result<Work> {
        self.transfer("send", true, tensor, peer, tag)
    }

    /// Receives into `tensor` from rank `peer`.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn recv(&self, tensor: &Tensor, peer: usize, tag: i32) -> Result<Work> {
        self.transfer("recv", false, tensor, peer, tag)
    }

    /// Waits, once its work is waited for, until all ranks have come here.
    ///
    /// # Errors
    /// See [`Self::all_reduce`].
    pub fn barrier(&self) -> Result<Work> {
        // SAFETY: the group is live.
        self.start("barrier", |failure, work| unsafe { ffi::ft_group_barrier(self.raw, failure, work) })
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

    fn collective(
        &self,
        op: &'static str,
        which: Collective,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        reduce: Option<ReduceOp>,
        root: usize,
    ) -> Result<Work> {
        let root = self.check_peer(op, root)?;
        let outputs = TensorList::of(outputs.iter().copied());
        let inputs = TensorList::of(inputs.iter().copied());
        self.start(op, |failure, work| {
            // SAFETY: the group and both lists are live.
            unsafe {
                ffi::ft_group_collective(
                    self.raw,
                    which as c_int,
                    outputs.as_ptr(),
                    inputs.as_ptr(),
                    reduce.map_or(0, ReduceOp::code),
                    root,
                    failure,
                    work,
                )
            }
        })
    }

    fn transfer(&self, op: &'static str, send: bool, tensor: &Tensor, peer: usize, tag: i32) -> Result<Work> {
        let raw_peer = self.check_peer(op, peer)?;
        if peer == self.rank {
            return Err(Error::argument(op, format!("rank {peer} cannot exchange messages with itself")));
        }
        self.start(op, |failure, work| {
            // SAFETY: group and tensor are live.
            unsafe { ffi::ft_group_transfer(self.raw, tensor.as_ptr(), send, raw_peer, tag, failure, work) }
        })
    }

    fn start(&self, op: &'static str, start: impl FnOnce(*mut Failure, *mut *mut RawWork) -> c_int) -> Result<Work> {
        let _one_at_a_time = self.lock();
        let mut raw = std::ptr::null_mut();
        ffi::call(op, |failure| start(failure, &raw mut raw))?;
        Ok(Work { op, parts: vec![Part { raw, done: Cell::new(false) }] })
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_count(&self, op: &'static str, what: &str, count: usize) -> Result<()> {
        if count == self.size {
            return Ok(());
        }
        Err(Error::argument(op, format!("{count} {what} for a group of {}; give one for each rank", self.size)))
    }

    fn check_root_list(&self, op: &'static str, what: &str, tensors: &[Tensor], root: usize) -> Result<()> {
        if root == self.rank {
            self.check_count(op, what, tensors.len())
        } else if tensors.is_empty() {
            Ok(())
        } else {
            Err(Error::argument(op, format!("only the root gives {what}; pass none on rank {}", self.rank)))
        }
    }

    fn check_peer(&self, op: &'static str, peer: usize) -> Result<i32> {
        i32::try_from(peer).ok().filter(|_| peer < self.size).ok_or_else(|| {
            Error::argument(op, format!("no rank {peer} in a group of {}; ranks count from 0", self.size))
        })
    }
}

/// An operation under way. It keeps its tensors alive; dropping it does not stop the operation.
#[must_use = "the result is there only after `wait`"]
pub struct Work {
    op: &'static str,
    parts: Vec<Part>,
}

struct Part {
    raw: *mut RawWork,
    done: Cell<bool>,
}

// SAFETY: c10d's works may be waited for on any thread, one at a time.
unsafe impl Send for Part {}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: ours alone, freed once.
        unsafe { ffi::ft_work_free(self.raw) };
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Work {
    fn all(op: &'static str, works: Vec<Work>) -> Self {
        Self { op, parts: works.into_iter().flat_map(|work| work.parts).collect() }
    }

    /// Waits for the operation: on the CPU until it is done; on CUDA until the current stream is made to wait for it,
    /// or, with a timeout, until it is done.
    ///
    /// Without a timeout of its own the wait ends, with an error, at the group's. After a timeout of a collective one
    /// may wait again. A timeout of Gloo's `send` or `recv` breaks the whole group, as Gloo has it.
    ///
    /// # Errors
    /// [`Error::Timeout`] when peers do not do their part in time; [`Error::Torch`] when one of them is gone or gave
    /// other shapes.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let start = std::time::Instant::now();
        for part in self.parts.iter().filter(|part| !part.done.get()) {
            let left = timeout.map_or(0, |timeout| ffi::milliseconds(timeout.saturating_sub(start.elapsed())));
            // SAFETY: the work is live.
            ffi::call(self.op, |failure| unsafe { ffi::ft_work_wait(part.raw, left, failure) })?;
            part.done.set(true);
        }
        Ok(())
    }

    /// Whether the operation has ended, well or not. Gloo cannot tell of `send` and `recv`, which count as under way
    /// until they are waited for.
    pub fn is_completed(&self) -> bool {
        // SAFETY: the works are live.
        self.parts.iter().all(|part| part.done.get() || unsafe { ffi::ft_work_completed(part.raw) })
    }
}

fn rank_and_size(op: &'static str, rank: usize, size: usize) -> Result<(i32, i32)> {
    match (i32::try_from(rank), i32::try_from(size)) {
        (Ok(raw_rank), Ok(raw_size)) if rank < size => Ok((raw_rank, raw_size)),
        _ => Err(Error::argument(op, format!("no rank {rank} in a group of {size}; ranks count from 0"))),
    }
}

fn refs(tensors: &[Tensor]) -> Vec<&Tensor> {
    tensors.iter().collect()
}

fn same_sizes(tensors: &[Tensor]) -> bool {
    tensors.windows(2).all(|pair| pair[0].size() == pair[1].size())
}

fn check_size(op: &'static str, left_name: &str, left: &Tensor, right_name: &str, right: &Tensor) -> Result<()> {
    let (left_shape, right_shape) = (left.size(), right.size());
    let (left_kind, right_kind): (Kind, Kind) = (torch(op, left.f_kind())?, torch(op, right.f_kind())?);
    if left_shape == right_shape && left_kind == right_kind {
        return Ok(());
    }
    Err(Error::argument(
        op,
        format!(
            "{left_name} is {left_kind:?}{left_shape:?} and {right_name} is {right_kind:?}{right_shape:?}; \
             they must be the same"
        ),
    ))
}

fn overwrite_bytes(destination: &Tensor, source: &Tensor) -> Result<()> {
    crate::storage::overwrite(destination, source)
}

fn torch<T>(op: &'static str, result: Result<T, tch::TchError>) -> Result<T> {
    result.map_err(|error| Error::Torch { op, message: error.to_string() })
}
