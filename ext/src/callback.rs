//! Rust closures that libtorch calls: who owns them, and how their errors and panics come back.
//!
//! A closure crosses as a thin box and two C functions: one that runs it and one that drops it. When it fails, the
//! boxed [`Error`] rides inside the C++ exception through the engine, from whatever thread it ran on, and
//! [`crate::ffi::call`] takes it out on the other side. Where nobody takes it (another binding caught the exception), the
//! exception drops it.

use std::any::Any;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::ffi::{self, RawSink};
use crate::{BoxError, Error};

/// State of a callback: one thread at a time, and never again from inside itself.
pub(crate) struct Exclusive<T> {
    owner: AtomicUsize,
    value: Mutex<T>,
}

impl<T> Exclusive<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { owner: AtomicUsize::new(0), value: Mutex::new(value) }
    }

    /// Runs `body` with the value; an error when this thread is inside `with` already.
    fn with<R>(&self, body: impl FnOnce(&mut T) -> Result<R, BoxError>) -> Result<R, BoxError> {
        let me = thread_token();
        // Only this thread writes its own token, so a stale read of another's cannot equal it.
        if self.owner.load(Ordering::Relaxed) == me {
            return Err("a function or hook ran again from inside itself; give each use a state of its own".into());
        }
        // A panic is reported as such by `run`; whether the state is still good is for its owner to know.
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        self.owner.store(me, Ordering::Relaxed);
        let _reset = Reset(&self.owner);
        body(&mut value)
    }
}

/// Forgets the owner on every way out, before the lock is released.
struct Reset<'a>(&'a AtomicUsize);

impl Drop for Reset<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// A number other than zero that no other living thread has: an address in its own storage.
fn thread_token() -> usize {
    thread_local! { static TOKEN: Cell<u8> = const { Cell::new(0) }; }
    TOKEN.with(|token| std::ptr::from_ref(token) as usize)
}

/// Gives a value to C++, to be dropped with [`drop_state`].
pub(crate) fn into_state<T>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(Exclusive::new(value))).cast()
}

/// Drops what [`into_state`] gave. A panic in the value's own `drop` ends here.
///
/// # Safety
/// `state` came from `into_state::<T>` and is not used after this.
pub(crate) unsafe extern "C" fn drop_state<T>(state: *mut c_void) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller gives back the box of this very type.
        drop(unsafe { Box::from_raw(state.cast::<Exclusive<T>>()) });
    }));
}

/// Runs a callback for C++: 0, or 1 after its error or panic was left in the sink.
///
/// # Safety
/// `state` came from `into_state::<T>` and lives; `sink` is the one that the shim gave for this call.
pub(crate) unsafe fn run<T>(
    state: *mut c_void,
    sink: *mut RawSink,
    body: impl FnOnce(&mut T) -> Result<(), BoxError>,
) -> c_int {
    // SAFETY: the caller gives a live state of this type; it is only ever shared, and `Exclusive` guards the value.
    let state = unsafe { &*state.cast::<Exclusive<T>>() };
    let error = match catch_unwind(AssertUnwindSafe(|| state.with(body))) {
        Ok(Ok(())) => return 0,
        // An error of a nested backward pass stays what it was, however deep.
        Ok(Err(source)) => match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::Callback { source },
        },
        Err(panic) => Error::Panicked { message: panic_message(panic.as_ref()) },
    };
    let message = error.to_string();
    let payload = Box::into_raw(Box::new(error)).cast();
    // SAFETY: the sink is the shim's for this call; it copies the message and takes over the payload.
    unsafe { ffi::ft_callback_fail(sink, message.as_ptr().cast::<c_char>(), message.len(), payload, drop_error) };
    1
}

/// Drops a payload that nobody took.
///
/// # Safety
/// `payload` is a `Box<Error>` given away by [`run`].
unsafe extern "C" fn drop_error(payload: *mut c_void) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller gives back the box.
        drop(unsafe { Box::from_raw(payload.cast::<Error>()) });
    }));
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "a value that is not text".to_owned()
    }
}
