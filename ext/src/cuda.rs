//! CUDA streams, events and memory statistics, over libtorch's device-neutral interfaces. On a CPU device a stream is
//! the calling thread's own order, and everything here does nothing.

use std::fmt;
use std::time::Duration;

use tch::{Device, Tensor};

use crate::ffi::{self, RawEvent};
use crate::{Error, Result};

/// Whether a CUDA device can be used.
pub fn is_available() -> bool {
    device_count() > 0
}

/// How many CUDA devices there are; 0 where libtorch has no CUDA or the machine no driver.
pub fn device_count() -> usize {
    load();
    // SAFETY: no preconditions.
    usize::try_from(unsafe { ffi::ft_cuda_device_count() }).unwrap_or(0)
}

/// The name of a CUDA device, such as `NVIDIA H100 80GB HBM3`; `None` for others.
pub fn device_name(device: Device) -> Option<String> {
    let index = index(device).ok()??;
    let mut name = std::ptr::null_mut();
    // SAFETY: `name` takes the string; the shim checks the index.
    ffi::call("device name", |failure| unsafe { ffi::ft_cuda_name(index, &raw mut name, failure) }).ok()?;
    ffi::take_string(name)
}

/// Waits for all work of a device.
///
/// # Errors
/// [`Error::Torch`] with what earlier kernels failed with.
pub fn synchronize(device: Device) -> Result<()> {
    match index(device)? {
        None => Ok(()),
        // SAFETY: no preconditions; libtorch checks the index.
        Some(index) => ffi::call("synchronize", |failure| unsafe { ffi::ft_cuda_synchronize(index, failure) }),
    }
}

/// A queue of kernels that run in order, beside other streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    device: Device,
    id: i64,
}

impl Stream {
    /// A side stream from libtorch's pool.
    ///
    /// # Errors
    /// [`Error::Torch`] when there is no such device.
    pub fn new(device: Device, high_priority: bool) -> Result<Self> {
        let mut id = 0;
        if let Some(index) = index(device)? {
            ffi::call("stream", |failure| {
                // SAFETY: `id` takes the result; libtorch checks the index.
                unsafe { ffi::ft_cuda_stream_new(index, high_priority, &raw mut id, failure) }
            })?;
        }
        Ok(Self { device, id })
    }

    /// The stream that kernels of this thread go to.
    ///
    /// # Errors
    /// [`Error::Torch`] when there is no such device.
    pub fn current(device: Device) -> Result<Self> {
        let mut id = 0;
        if let Some(index) = index(device)? {
            ffi::call("current stream", |failure| {
                // SAFETY: `id` takes the result; libtorch checks the index.
                unsafe { ffi::ft_cuda_stream_current(index, &raw mut id, failure) }
            })?;
        }
        Ok(Self { device, id })
    }

    /// Its device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Runs `body` with this stream as the current one of its device on this thread; also a panic restores the one
    /// before.
    ///
    /// # Errors
    /// [`Error::Torch`] when the stream cannot be made current; `body` has not run then.
    pub fn with<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        struct Restore(i32, i64);
        impl Drop for Restore {
            fn drop(&mut self) {
                // Nothing can be done about a failure here; the next kernel reports it.
                let _ = set_current(self.0, self.1);
            }
        }
        let _restore = match index(self.device)? {
            None => None,
            Some(index) => Some(Restore(index, set_current(index, self.id)?)),
        };
        Ok(body())
    }

    /// Makes what is queued later wait for the event.
    ///
    /// # Errors
    /// [`Error::Torch`] when CUDA refuses.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        match (index(self.device)?, event.raw) {
            (Some(index), Some(raw)) => ffi::call("wait for event", |failure| {
                // SAFETY: the event is live.
                unsafe { ffi::ft_cuda_event_block(raw, index, self.id, failure) }
            }),
            _ => Ok(()),
        }
    }

    /// Makes what is queued later wait for all that is queued on `other` now.
    ///
    /// # Errors
    /// [`Error::Torch`] when CUDA refuses.
    pub fn wait_stream(&self, other: &Self) -> Result<()> {
        self.wait_event(&other.record()?)
    }

    /// An event that is reached once all that is queued now has run.
    ///
    /// # Errors
    /// [`Error::Torch`] when CUDA refuses.
    pub fn record(&self) -> Result<Event> {
        self.event(false)
    }

    /// As [`Self::record`], and remembers when, for [`Event::elapsed_until`].
    ///
    /// # Errors
    /// [`Error::Torch`] when CUDA refuses.
    pub fn record_time(&self) -> Result<Event> {
        self.event(true)
    }

    fn event(&self, timing: bool) -> Result<Event> {
        let Some(index) = index(self.device)? else { return Ok(Event { raw: None }) };
        let mut raw = std::ptr::null_mut();
        ffi::call("record event", |failure| {
            // SAFETY: `raw` takes the new event.
            unsafe { ffi::ft_cuda_event_record(index, self.id, timing, failure, &raw mut raw) }
        })?;
        Ok(Event { raw: Some(raw) })
    }

    /// Waits until all that is queued has run.
    ///
    /// # Errors
    /// [`Error::Torch`] with what earlier kernels failed with.
    pub fn synchronize(&self) -> Result<()> {
        match index(self.device)? {
            None => Ok(()),
            Some(index) => ffi::call("stream synchronize", |failure| {
                // SAFETY: the shim makes the stream from device and id.
                unsafe { ffi::ft_cuda_stream_synchronize(index, self.id, failure) }
            }),
        }
    }

    /// Keeps the tensor's memory, once freed, from reuse until what is queued here now has run. For a tensor made on
    /// one stream and used on another.
    ///
    /// # Errors
    /// [`Error::Torch`] when CUDA refuses.
    pub fn record_tensor(&self, tensor: &Tensor) -> Result<()> {
        match index(self.device)? {
            None => Ok(()),
            Some(index) => ffi::call("record tensor", |failure| {
                // SAFETY: the tensor is live.
                unsafe { ffi::ft_cuda_stream_record_tensor(index, self.id, tensor.as_ptr(), failure) }
            }),
        }
    }
}

/// A point in a stream.
pub struct Event {
    /// `None` on the CPU, where every point has been reached.
    raw: Option<*mut RawEvent>,
}

// SAFETY: CUDA's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: no method changes the event.
unsafe impl Sync for Event {}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("cuda", &self.raw.is_some()).finish_non_exhaustive()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(raw) = self.raw {
            // SAFETY: ours alone, freed once.
            unsafe { ffi::ft_cuda_event_free(raw) };
        }
    }
}

impl Event {
    /// Waits until the event is reached.
    ///
    /// # Errors
    /// [`Error::Torch`] with what earlier kernels failed with.
    pub fn synchronize(&self) -> Result<()> {
        match self.raw {
            None => Ok(()),
            Some(raw) => ffi::call("event synchronize", |failure| {
                // SAFETY: the event is live.
                unsafe { ffi::ft_cuda_event_synchronize(raw, failure) }
            }),
        }
    }

    /// Whether the event has been reached.
    ///
    /// # Errors
    /// [`Error::Torch`] with what earlier kernels failed with.
    pub fn is_reached(&self) -> Result<bool> {
        let Some(raw) = self.raw else { return Ok(true) };
        let mut done = false;
        // SAFETY: the event is live.
        ffi::call("event query", |failure| unsafe { ffi::ft_cuda_event_query(raw, &raw mut done, failure) })?;
        Ok(done)
    }

    /// The device's time from this event to a later one; `None` on the CPU. Both made by [`Stream::record_time`] and
    /// reached.
    ///
    /// # Errors
    /// [`Error::Torch`] when they are not.
    pub fn elapsed_until(&self, end: &Self) -> Result<Option<Duration>> {
        let (Some(start), Some(end)) = (self.raw, end.raw) else { return Ok(None) };
        let mut ms = 0.0;
        ffi::call("elapsed time", |failure| {
            // SAFETY: both events are live.
            unsafe { ffi::ft_cuda_event_elapsed(start, end, &raw mut ms, failure) }
        })?;
        Ok(Some(Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default()))
    }
}

/// What libtorch's allocator holds of a device's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryStats {
    /// In tensors now.
    pub allocated: u64,
    /// In tensors at most, since the start or [`reset_peak`].
    pub peak_allocated: u64,
    /// Taken from the device now, free blocks included.
    pub reserved: u64,
    /// Taken from the device at most.
    pub peak_reserved: u64,
}

/// The allocator's statistics of a CUDA device; `None` for others ([`crate::memory`] has the process's own).
pub fn memory_stats(device: Device) -> Option<MemoryStats> {
    let index = index(device).ok()??;
    let mut stats = [0; 4];
    // SAFETY: `stats` takes four numbers.
    ffi::call("memory statistics", |failure| unsafe { ffi::ft_cuda_memory(index, &raw mut stats, failure) }).ok()?;
    let [allocated, peak_allocated, reserved, peak_reserved] = stats.map(i64::unsigned_abs);
    Some(MemoryStats { allocated, peak_allocated, reserved, peak_reserved })
}

/// Lets the peaks of a device start from what is held now.
///
/// # Errors
/// [`Error::Torch`] when there is no such device.
pub fn reset_peak(device: Device) -> Result<()> {
    match index(device)? {
        None => Ok(()),
        // SAFETY: no preconditions; libtorch checks the index.
        Some(index) => ffi::call("reset peak", |failure| unsafe { ffi::ft_cuda_reset_peak(index, failure) }),
    }
}

/// Loads libtorch's CUDA part, where there is one and a driver for it, once. A linker drops that library from programs
/// that name none of its symbols, and loading it takes a second, which a machine without a GPU need not spend.
pub(crate) fn load() {
    crate::library::load_cuda();
}

/// The index of a CUDA device; `None` for the CPU.
fn index(device: Device) -> Result<Option<i32>> {
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(index) if is_available() => i32::try_from(index)
            .map(Some)
            .map_err(|_| Error::argument("cuda device", format!("no device of index {index}"))),
        Device::Cuda(_) => Err(Error::Unsupported {
            what: "cuda",
            why: "this machine has no CUDA device that this libtorch can use; use the CPU".to_owned(),
        }),
        other => Err(Error::Unsupported { what: "streams", why: format!("{other:?} has none; use CPU or CUDA") }),
    }
}

fn set_current(index: i32, id: i64) -> Result<i64> {
    let mut previous = 0;
    ffi::call("set stream", |failure| {
        // SAFETY: `previous` takes the result; the shim makes the stream from device and id.
        unsafe { ffi::ft_cuda_stream_set(index, id, &raw mut previous, failure) }
    })?;
    Ok(previous)
}
