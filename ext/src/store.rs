//! Key-value stores through which ranks find each other: c10d's `TCPStore` and `HashStore`.

use std::ffi::{CString, c_char};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::ffi::{self, RawStore};
use crate::{Error, Result};

/// Where a TCP store is, and who serves it.
#[derive(Debug, Clone)]
pub struct TcpStoreOptions {
    /// Name or address of the machine that serves.
    pub host: String,
    /// Its port; 0 lets the server take a free one ([`Store::port`] tells which).
    pub port: u16,
    /// Whether this process serves: exactly one does.
    pub is_server: bool,
    /// When given, the server returns only once so many clients, itself included, have connected.
    pub world_size: Option<usize>,
    /// How long to try to connect, and how long [`Store::get`] waits for a key.
    pub timeout: Duration,
}

/// A key-value store shared by all ranks. A clone is another handle of the same connection.
///
/// The calls on one connection take turns, and a waiting call holds its turn: threads that wait for each other need a
/// connection each.
#[derive(Clone)]
pub struct Store(Arc<Handle>);

struct Handle {
    raw: *mut RawStore,
    port: Option<u16>,
    loopback: bool,
}

// SAFETY: c10d's stores serialize their calls with a lock of their own.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: ours alone, freed once.
        unsafe { ffi::ft_store_free(self.raw) };
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("port", &self.0.port).finish_non_exhaustive()
    }
}

impl Store {
    /// Serves or connects to a store over TCP.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the server does not answer, or not all clients come, in time; [`Error::Torch`] when the
    /// port is taken.
    pub fn tcp(options: &TcpStoreOptions) -> Result<Self> {
        const OP: &str = "store tcp";
        let host = CString::new(options.host.as_str())
            .map_err(|_| Error::argument(OP, "the host contains a nul byte; give a name or an address"))?;
        let world_size = match options.world_size {
            None => -1,
            Some(size) => i64::try_from(size).map_err(|_| Error::argument(OP, "the world size does not fit an i64"))?,
        };
        if options.port == 0 && !options.is_server {
            return Err(Error::argument(OP, "a client needs the server's port; port 0 is for the server alone"));
        }
        let mut raw = std::ptr::null_mut();
        ffi::call(OP, |failure| {
            // SAFETY: the string is nul-terminated and lives through the call; `raw` takes the new handle.
            unsafe {
                ffi::ft_store_tcp(
                    host.as_ptr(),
                    options.port,
                    options.is_server,
                    world_size,
                    ffi::milliseconds(options.timeout),
                    failure,
                    &raw mut raw,
                )
            }
        })?;
        // SAFETY: `raw` is a live TCP store.
        let port = Some(unsafe { ffi::ft_store_port(raw) });
        let loopback = matches!(options.host.as_str(), "localhost" | "::1") || options.host.starts_with("127.");
        Ok(Self(Arc::new(Handle { raw, port, loopback })))
    }

    /// A store in memory, for ranks that are threads of this process.
    pub fn hash() -> Self {
        // SAFETY: no preconditions.
        let raw = unsafe { ffi::ft_store_hash() };
        Self(Arc::new(Handle { raw, port: None, loopback: true }))
    }

    /// The same store with `prefix` and a slash before every key: one a group.
    pub fn prefix(&self, prefix: &str) -> Self {
        let mut raw = std::ptr::null_mut();
        let made = ffi::call("store prefix", |failure| {
            // SAFETY: `self` is live; the shim copies the prefix.
            unsafe { ffi::ft_store_prefix(self.raw(), prefix.as_ptr().cast(), prefix.len(), failure, &raw mut raw) }
        });
        made.expect("a prefix store only holds its parent and a string, so making one cannot fail");
        Self(Arc::new(Handle { raw, port: self.0.port, loopback: self.0.loopback }))
    }

    /// The port of a TCP store; `None` for one in memory.
    pub fn port(&self) -> Option<u16> {
        self.0.port
    }

    /// Whether every rank that can reach this store is on this machine, so far as its address tells.
    pub(crate) fn is_loopback(&self) -> bool {
        self.0.loopback
    }

    pub(crate) fn raw(&self) -> *const RawStore {
        self.0.raw
    }

    /// Sets a key.
    ///
    /// # Errors
    /// [`Error::Torch`] when the connection is lost.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        ffi::call("store set", |failure| {
            // SAFETY: `self` is live; pointers and lengths are of live slices.
            unsafe {
                ffi::ft_store_set(self.raw(), key.as_ptr().cast(), key.len(), value.as_ptr(), value.len(), failure)
            }
        })
    }

    /// The value of a key, waiting for it as long as the store's timeout.
    ///
    /// # Errors
    /// [`Error::Timeout`] when nobody sets the key in time; [`Error::Torch`] when the connection is lost.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let mut value = std::ptr::null_mut();
        let mut length = 0;
        ffi::call("store get", |failure| {
            // SAFETY: `self` is live; `value` takes an allocation of `length` bytes.
            unsafe {
                ffi::ft_store_get(self.raw(), key.as_ptr().cast(), key.len(), &raw mut value, &raw mut length, failure)
            }
        })?;
        // SAFETY: on success `value` points to `length` bytes, and is not null even for none.
        let copy = unsafe { std::slice::from_raw_parts(value, length) }.to_vec();
        // SAFETY: the allocation is the shim's, freed once.
        unsafe { ffi::ft_string_free(value.cast::<c_char>()) };
        Ok(copy)
    }

    /// Adds to the number under a key, which starts at 0, and gives the sum.
    ///
    /// # Errors
    /// [`Error::Torch`] when the connection is lost or the key holds no number.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let mut sum = 0;
        ffi::call("store add", |failure| {
            // SAFETY: `self` is live; pointer and length are of a live string.
            unsafe { ffi::ft_store_add(self.raw(), key.as_ptr().cast(), key.len(), amount, &raw mut sum, failure) }
        })?;
        Ok(sum)
    }

    /// Waits until all the keys are set.
    ///
    /// # Errors
    /// [`Error::Timeout`] when they are not in time; [`Error::Torch`] when the connection is lost.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let pointers: Vec<*const c_char> = keys.iter().map(|key| key.as_ptr().cast()).collect();
        let lengths: Vec<usize> = keys.iter().map(|key| key.len()).collect();
        ffi::call("store wait", |failure| {
            // SAFETY: `self` is live; both arrays have as many elements as there are keys.
            unsafe {
                ffi::ft_store_wait(
                    self.raw(),
                    pointers.as_ptr(),
                    lengths.as_ptr(),
                    keys.len(),
                    ffi::milliseconds(timeout),
                    failure,
                )
            }
        })
    }

    /// Whether a key is set.
    ///
    /// # Errors
    /// [`Error::Torch`] when the connection is lost.
    pub fn check(&self, key: &str) -> Result<bool> {
        let mut found = false;
        ffi::call("store check", |failure| {
            // SAFETY: `self` is live; pointer and length are of a live string.
            unsafe { ffi::ft_store_check(self.raw(), key.as_ptr().cast(), key.len(), &raw mut found, failure) }
        })?;
        Ok(found)
    }

    /// Removes a key, and tells whether it was there.
    ///
    /// # Errors
    /// [`Error::Torch`] when the connection is lost.
    pub fn delete(&self, key: &str) -> Result<bool> {
        let mut found = false;
        ffi::call("store delete", |failure| {
            // SAFETY: `self` is live; pointer and length are of a live string.
            unsafe { ffi::ft_store_delete(self.raw(), key.as_ptr().cast(), key.len(), &raw mut found, failure) }
        })?;
        Ok(found)
    }

    /// How many keys the whole store has, those of other prefixes and c10d's own included.
    ///
    /// # Errors
    /// [`Error::Torch`] when the connection is lost.
    pub fn num_keys(&self) -> Result<i64> {
        let mut count = 0;
        ffi::call("store num_keys", |failure| {
            // SAFETY: `self` is live.
            unsafe { ffi::ft_store_num_keys(self.raw(), &raw mut count, failure) }
        })?;
        Ok(count)
    }
}
