//! The C interface of the shim (`shim/shim.h`), and the one way to call it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::{Duration, Instant};

use torch_sys::C_tensor;

use crate::{Error, Result};

/// `std::vector<at::Tensor>`; undefined tensors are null at this boundary.
#[repr(C)]
pub(crate) struct RawList {
    _private: [u8; 0],
}

/// What a function sees of its node while it runs.
#[repr(C)]
pub(crate) struct RawContext {
    _private: [u8; 0],
}

/// Where a callback leaves the error it fails with.
#[repr(C)]
pub(crate) struct RawSink {
    _private: [u8; 0],
}

/// `c10::intrusive_ptr<c10d::Store>`.
#[repr(C)]
pub(crate) struct RawStore {
    _private: [u8; 0],
}

/// A c10d backend.
#[repr(C)]
pub(crate) struct RawGroup {
    _private: [u8; 0],
}

/// `c10::intrusive_ptr<c10d::Work>`.
#[repr(C)]
pub(crate) struct RawWork {
    _private: [u8; 0],
}

/// `c10::Event`.
#[repr(C)]
pub(crate) struct RawEvent {
    _private: [u8; 0],
}

/// Why a call failed: filled in when its status is not `OK`.
#[repr(C)]
pub(crate) struct Failure {
    /// From `malloc`; ours to free.
    message: *mut c_char,
    /// A `Box<Error>` that a callback gave the engine, or null.
    payload: *mut c_void,
}

const OK: c_int = 0;
const TIMEOUT: c_int = 2;

pub(crate) type DropFn = unsafe extern "C" fn(state: *mut c_void);
pub(crate) type FunctionFn = unsafe extern "C" fn(
    state: *mut c_void,
    context: *mut RawContext,
    inputs: *const RawList,
    outputs: *mut RawList,
    sink: *mut RawSink,
) -> c_int;
pub(crate) type HookFn = unsafe extern "C" fn(
    state: *mut c_void,
    tensor: *const C_tensor,
    output: *mut *mut C_tensor,
    sink: *mut RawSink,
) -> c_int;

unsafe extern "C" {
    pub(crate) fn ft_string_free(text: *mut c_char);
    pub(crate) fn ft_callback_fail(
        sink: *mut RawSink,
        message: *const c_char,
        length: usize,
        payload: *mut c_void,
        drop: DropFn,
    );

    pub(crate) fn ft_list_new() -> *mut RawList;
    pub(crate) fn ft_list_free(list: *mut RawList);
    pub(crate) fn ft_list_push(list: *mut RawList, tensor: *const C_tensor);
    pub(crate) fn ft_list_len(list: *const RawList) -> usize;
    pub(crate) fn ft_list_get(list: *const RawList, index: usize) -> *mut C_tensor;

    pub(crate) fn ft_function_apply(
        state: *mut c_void,
        drop: DropFn,
        forward: FunctionFn,
        backward: FunctionFn,
        inputs: *const RawList,
        outputs: *mut RawList,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_context_save(context: *mut RawContext, tensor: *const C_tensor);
    pub(crate) fn ft_context_saved(context: *mut RawContext, list: *mut RawList, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_context_needs_input_grad(context: *mut RawContext, index: usize) -> bool;
    pub(crate) fn ft_context_mark_non_differentiable(context: *mut RawContext, tensor: *const C_tensor);
    pub(crate) fn ft_context_set_materialize_grads(context: *mut RawContext, value: bool);
    pub(crate) fn ft_backward(
        outputs: *const RawList,
        grads: *const RawList,
        retain_graph: bool,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_grad(
        outputs: *const RawList,
        inputs: *const RawList,
        grad_outputs: *const RawList,
        retain_graph: bool,
        create_graph: bool,
        grads: *mut RawList,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_set_gradient(tensor: *const C_tensor, gradient: *const C_tensor, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_grad_mode(enabled: bool) -> bool;
    pub(crate) fn ft_grad_mode_enabled() -> bool;

    pub(crate) fn ft_hook_gradient(
        tensor: *const C_tensor,
        state: *mut c_void,
        drop: DropFn,
        call: HookFn,
        index: *mut u32,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_hook_gradient_remove(tensor: *const C_tensor, index: u32, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_hook_accumulated(
        tensor: *const C_tensor,
        state: *mut c_void,
        drop: DropFn,
        call: HookFn,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_hook_accumulated_clear(tensor: *const C_tensor, failure: *mut Failure) -> c_int;

    pub(crate) fn ft_store_tcp(
        host: *const c_char,
        port: u16,
        is_server: bool,
        world_size: i64,
        timeout_ms: i64,
        failure: *mut Failure,
        store: *mut *mut RawStore,
    ) -> c_int;
    pub(crate) fn ft_store_hash() -> *mut RawStore;
    pub(crate) fn ft_store_free(store: *mut RawStore);
    pub(crate) fn ft_store_port(store: *const RawStore) -> u16;
    pub(crate) fn ft_store_prefix(
        store: *const RawStore,
        prefix: *const c_char,
        length: usize,
        failure: *mut Failure,
        out: *mut *mut RawStore,
    ) -> c_int;
    pub(crate) fn ft_store_set(
        store: *const RawStore,
        key: *const c_char,
        key_length: usize,
        value: *const u8,
        length: usize,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_store_get(
        store: *const RawStore,
        key: *const c_char,
        key_length: usize,
        value: *mut *mut u8,
        length: *mut usize,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_store_add(
        store: *const RawStore,
        key: *const c_char,
        key_length: usize,
        amount: i64,
        sum: *mut i64,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_store_wait(
        store: *const RawStore,
        keys: *const *const c_char,
        key_lengths: *const usize,
        count: usize,
        timeout_ms: i64,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_store_check(
        store: *const RawStore,
        key: *const c_char,
        key_length: usize,
        found: *mut bool,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_store_delete(
        store: *const RawStore,
        key: *const c_char,
        key_length: usize,
        found: *mut bool,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_store_num_keys(store: *const RawStore, count: *mut i64, failure: *mut Failure) -> c_int;

    pub(crate) fn ft_group_gloo(
        store: *const RawStore,
        rank: i32,
        size: i32,
        timeout_ms: i64,
        interface: *const c_char,
        hostname: *const c_char,
        failure: *mut Failure,
        group: *mut *mut RawGroup,
    ) -> c_int;
    pub(crate) fn ft_group_nccl(
        store: *const RawStore,
        rank: i32,
        size: i32,
        timeout_ms: i64,
        high_priority: bool,
        failure: *mut Failure,
        group: *mut *mut RawGroup,
    ) -> c_int;
    /// Null where NCCL can be used; else why not, from `malloc`.
    pub(crate) fn ft_nccl_missing() -> *mut c_char;
    pub(crate) fn ft_group_free(group: *mut RawGroup);
    pub(crate) fn ft_group_abort(group: *const RawGroup, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_group_collective(
        group: *const RawGroup,
        which: c_int,
        outputs: *const RawList,
        inputs: *const RawList,
        reduce: c_int,
        root: i32,
        failure: *mut Failure,
        work: *mut *mut RawWork,
    ) -> c_int;
    pub(crate) fn ft_group_all_to_all(
        group: *const RawGroup,
        output: *const C_tensor,
        input: *const C_tensor,
        output_splits: *const i64,
        input_splits: *const i64,
        count: usize,
        failure: *mut Failure,
        work: *mut *mut RawWork,
    ) -> c_int;
    pub(crate) fn ft_group_transfer(
        group: *const RawGroup,
        tensor: *const C_tensor,
        send: bool,
        peer: i32,
        tag: i32,
        failure: *mut Failure,
        work: *mut *mut RawWork,
    ) -> c_int;
    pub(crate) fn ft_group_barrier(group: *const RawGroup, failure: *mut Failure, work: *mut *mut RawWork) -> c_int;
    pub(crate) fn ft_work_wait(work: *const RawWork, timeout_ms: i64, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_work_completed(work: *const RawWork) -> bool;
    pub(crate) fn ft_work_free(work: *mut RawWork);

    pub(crate) fn ft_storage_nbytes(tensor: *const C_tensor) -> usize;
    pub(crate) fn ft_storage_released(tensor: *const C_tensor) -> bool;
    pub(crate) fn ft_storage_id(tensor: *const C_tensor) -> usize;
    pub(crate) fn ft_storage_release(tensor: *const C_tensor, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_storage_refill(tensor: *const C_tensor, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_overwrite(destination: *const C_tensor, source: *const C_tensor, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_set_data(destination: *const C_tensor, source: *const C_tensor, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_version(tensor: *const C_tensor) -> u64;
    pub(crate) fn ft_read(tensor: *const C_tensor, bytes: *mut u8, length: usize, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_write(tensor: *const C_tensor, bytes: *const u8, length: usize, failure: *mut Failure) -> c_int;

    pub(crate) fn ft_fused_adamw(
        params: *const RawList,
        grads: *const RawList,
        exp_avgs: *const RawList,
        exp_avg_sqs: *const RawList,
        state_steps: *const RawList,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
        maximize: bool,
        failure: *mut Failure,
    ) -> c_int;

    /// Loads the library at `path` for good, where a CUDA driver can be loaded.
    pub(crate) fn ft_load_cuda(path: *const c_char);
    pub(crate) fn ft_cuda_device_count() -> i32;
    /// The name is from `malloc`.
    pub(crate) fn ft_cuda_name(device: i32, name: *mut *mut c_char, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_synchronize(device: i32, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_stream_new(device: i32, high_priority: bool, id: *mut i64, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_stream_current(device: i32, id: *mut i64, failure: *mut Failure) -> c_int;
    /// Makes the stream current on its device and gives the one that was.
    pub(crate) fn ft_cuda_stream_set(device: i32, id: i64, previous: *mut i64, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_stream_synchronize(device: i32, id: i64, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_stream_record_tensor(
        device: i32,
        id: i64,
        tensor: *const C_tensor,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_cuda_event_record(
        device: i32,
        id: i64,
        timing: bool,
        failure: *mut Failure,
        event: *mut *mut RawEvent,
    ) -> c_int;
    pub(crate) fn ft_cuda_event_block(event: *const RawEvent, device: i32, id: i64, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_event_synchronize(event: *const RawEvent, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_event_query(event: *const RawEvent, done: *mut bool, failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_event_elapsed(
        start: *const RawEvent,
        end: *const RawEvent,
        ms: *mut f64,
        failure: *mut Failure,
    ) -> c_int;
    pub(crate) fn ft_cuda_event_free(event: *mut RawEvent);
    pub(crate) fn ft_cuda_memory(device: i32, stats: *mut [i64; 4], failure: *mut Failure) -> c_int;
    pub(crate) fn ft_cuda_reset_peak(device: i32, failure: *mut Failure) -> c_int;

    pub(crate) fn ft_malloc_trim();
    pub(crate) fn ft_torch_version() -> *const c_char;
    pub(crate) fn ft_cxx11_abi() -> bool;
    /// From `malloc`.
    pub(crate) fn ft_parallel_info() -> *mut c_char;
    pub(crate) fn ft_set_deterministic(value: bool);
    pub(crate) fn ft_deterministic() -> bool;
}

/// Runs one call of the shim and turns its failure into an error.
///
/// `call` gets the place for the failure and gives the status.
pub(crate) fn call(op: &'static str, call: impl FnOnce(*mut Failure) -> c_int) -> Result<()> {
    let start = Instant::now();
    let mut failure = Failure { message: std::ptr::null_mut(), payload: std::ptr::null_mut() };
    let status = call(&raw mut failure);
    if status == OK {
        return Ok(());
    }
    let message = take_string(failure.message).unwrap_or_else(|| "libtorch gave no reason".to_owned());
    if !failure.payload.is_null() {
        // SAFETY: the only payloads are the boxes that `callback::fail` gave, and the shim gives each away once.
        return Err(*unsafe { Box::from_raw(failure.payload.cast::<Error>()) });
    }
    Err(match status {
        TIMEOUT => Error::Timeout { op, after: start.elapsed(), message },
        _ => Error::Torch { op, message },
    })
}

/// Copies a string that the shim allocated, and frees it; `None` for null.
pub(crate) fn take_string(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the shim gives nul-terminated strings of its own allocator, each to be freed once.
    let copy = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: as above; `text` is not used after this.
    unsafe { ft_string_free(text) };
    Some(copy)
}

/// Milliseconds as the shim takes them: at least one, since zero means forever to c10d, and at most 30 days, since it
/// adds them to a clock.
pub(crate) fn milliseconds(timeout: Duration) -> i64 {
    const LONGEST: u128 = 30 * 24 * 3600 * 1000;
    i64::try_from(timeout.as_millis().clamp(1, LONGEST)).expect("30 days of milliseconds fit an i64")
}
