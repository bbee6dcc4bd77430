//! A blocking face of an object store.

mod address;
mod pending;
mod writer;

use std::fmt;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::path::{Path, PathPart};
use object_store::{ObjectStore, ObjectStoreExt, PutMode};

pub(crate) use self::pending::Pending;
pub use self::writer::Writer;
use crate::{Error, Result};

/// A folder of objects, on a disk or in a service. Every call waits for its answer; any thread may call, also one of
/// an asynchronous runtime. Clones are the same store.
///
/// Services are asked again when they fail, as the default of `object_store`'s `RetryConfig` says. A request that has no
/// answer within the [timeout](Store::with_timeout), retries included, is [`Error::TimedOut`].
#[derive(Clone)]
pub struct Store {
    objects: Arc<dyn ObjectStore>,
    /// What stands before a path in messages.
    address: String,
    prefix: Path,
    /// The folder, where it is one that this process can see.
    folder: Option<PathBuf>,
    timeout: Duration,
}

impl Store {
    /// How long a request may take unless [`Store::with_timeout`] says otherwise.
    pub const TIMEOUT: Duration = Duration::from_secs(300);

    /// The store at a path, or at an address such as `s3://bucket/folder`, `gs://…`, `az://…` or `file://…`. Nothing is
    /// asked of it, nor made, until it is used.
    ///
    /// Credentials and endpoints of services come from the environment variables that their own tools read (`AWS_*`,
    /// `GOOGLE_*`, `AZURE_*`). What is written to a local folder is on the disk (`fsync`) when the call returns.
    ///
    /// # Errors
    /// [`Error::Address`]; [`Error::FeatureOff`].
    pub fn open(address: &str) -> Result<Self> {
        address::open(address)
    }

    /// A folder of any object store.
    ///
    /// # Errors
    /// [`Error::Address`] when the prefix is no path.
    pub fn from_object_store(objects: Arc<dyn ObjectStore>, prefix: &str) -> Result<Self> {
        let bad =
            |error: object_store::path::Error| Error::Address { address: prefix.to_owned(), reason: error.to_string() };
        let (address, prefix) = (objects.to_string(), Path::parse(prefix).map_err(bad)?);
        Ok(Store { address: format!("{address}/{prefix}"), objects, prefix, folder: None, timeout: Self::TIMEOUT })
    }

    /// The same store, where a request may take this long.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// A folder in it.
    #[must_use]
    pub fn below(&self, folder: &str) -> Self {
        let mut below = self.clone();
        below.address = format!("{}/{folder}", self.address.trim_end_matches('/'));
        for part in folder.split('/').filter(|part| !part.is_empty()) {
            below.prefix = below.prefix.join(PathPart::from(part));
            below.folder = below.folder.map(|folder| folder.join(part));
        }
        below
    }

    /// The whole path or address of an object, as messages give it; of the folder itself for an empty path.
    pub fn name(&self, path: &str) -> String {
        if path.is_empty() { self.address.clone() } else { format!("{}/{path}", self.address.trim_end_matches('/')) }
    }

    /// All of an object.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::TooLarge`] when it has more than `max_bytes`; the store's.
    pub fn get(&self, path: &str, max_bytes: u64) -> Result<Bytes> {
        let (objects, location) = (self.objects.clone(), self.locate(path)?);
        let read = self.start("read", path, async move {
            let mut content = objects.get(&location).await?.into_stream();
            let mut bytes = BytesMut::new();
            while let Some(chunk) = content.next().await {
                bytes.extend_from_slice(&chunk?);
                if bytes.len() as u64 > max_bytes {
                    return Ok(None);
                }
            }
            Ok(Some(bytes.freeze()))
        })?;
        read.wait()?.ok_or_else(|| Error::TooLarge { object: self.name(path), limit: max_bytes })
    }

    /// These bytes of an object.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Damaged`] when the object ends before they do; the store's.
    pub fn get_range(&self, path: &str, range: Range<u64>) -> Result<Bytes> {
        let bytes = self.get_range_start(path, range.clone())?.wait()?;
        self.whole(path, &range, bytes)
    }

    /// [`Store::get_range`], pending; the caller checks the length by [`Store::whole`].
    pub(crate) fn get_range_start(&self, path: &str, range: Range<u64>) -> Result<Pending<Bytes>> {
        let (objects, location) = (self.objects.clone(), self.locate(path)?);
        self.start("read", path, async move { objects.get_range(&location, range).await })
    }

    /// Refuses fewer bytes than were asked for.
    pub(crate) fn whole(&self, path: &str, range: &Range<u64>, bytes: Bytes) -> Result<Bytes> {
        if bytes.len() as u64 == range.end.saturating_sub(range.start) {
            return Ok(bytes);
        }
        let reason = format!("it should have bytes {} to {}, but gave {} of them", range.start, range.end, bytes.len());
        Err(Error::Damaged { object: self.name(path), reason })
    }

    /// How many bytes an object has.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the store's.
    pub fn size(&self, path: &str) -> Result<u64> {
        let (objects, location) = (self.objects.clone(), self.locate(path)?);
        self.start("look up", path, async move { Ok(objects.head(&location).await?.size) })?.wait()
    }

    /// Whether there is such an object.
    ///
    /// # Errors
    /// The store's.
    pub fn exists(&self, path: &str) -> Result<bool> {
        match self.size(path) {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes an object at once, over one that is there.
    ///
    /// # Errors
    /// The store's.
    pub fn put(&self, path: &str, bytes: Bytes) -> Result<()> {
        self.put_start(path, bytes)?.wait()
    }

    pub(crate) fn put_start(&self, path: &str, bytes: Bytes) -> Result<Pending<()>> {
        let (objects, location) = (self.objects.clone(), self.locate(path)?);
        self.start("write", path, async move { objects.put(&location, bytes.into()).await.map(drop) })
    }

    /// Writes an object unless there is one; says whether it did. Of several that try at once, one does.
    ///
    /// # Errors
    /// The store's.
    pub fn put_if_absent(&self, path: &str, bytes: Bytes) -> Result<bool> {
        let (objects, location) = (self.objects.clone(), self.locate(path)?);
        let put = self.start("write", path, async move {
            match objects.put_opts(&location, bytes.into(), PutMode::Create.into()).await {
                Ok(_) => Ok(true),
                Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        })?;
        put.wait()
    }

    /// Every object in a folder and the folders in it, by its path in this store, with its bytes, in order of the paths.
    /// A folder that is not there has none.
    ///
    /// # Errors
    /// The store's.
    pub fn list(&self, folder: &str) -> Result<Vec<(String, u64)>> {
        let (objects, location) = (self.objects.clone(), self.locate(folder)?);
        let listed = self.start("list", folder, async move { objects.list(Some(&location)).try_collect().await });
        let listed: Vec<object_store::ObjectMeta> = absent_is_empty(listed?.wait())?;
        let mut found: Vec<_> =
            listed.into_iter().filter_map(|meta| Some((self.relative(&meta.location)?, meta.size))).collect();
        found.sort();
        Ok(found)
    }

    /// The names of the folders in a folder, also of empty ones where a store knows such.
    ///
    /// # Errors
    /// The store's.
    pub fn folders(&self, folder: &str) -> Result<Vec<String>> {
        let (objects, location) = (self.objects.clone(), self.locate(folder)?);
        let listed = self.start("list", folder, async move {
            Ok(objects.list_with_delimiter(Some(&location)).await?.common_prefixes)
        });
        let listed: Vec<Path> = absent_is_empty(listed?.wait())?;
        Ok(listed.iter().filter_map(|path| path.filename().map(str::to_owned)).collect())
    }

    /// Removes an object. One that is not there is no error.
    ///
    /// # Errors
    /// The store's.
    pub fn delete(&self, path: &str) -> Result<()> {
        let (objects, location) = (self.objects.clone(), self.locate(path)?);
        match self.start("delete", path, async move { objects.delete(&location).await })?.wait() {
            Err(Error::NotFound { .. }) => Ok(()),
            other => other,
        }
    }

    /// Removes a folder with everything in it. One that is not there is no error.
    ///
    /// # Errors
    /// The store's.
    pub fn delete_folder(&self, path: &str) -> Result<()> {
        if let Some(folder) = &self.below(path).folder {
            // Here the folder itself goes too, and what a killed process left half written, which no list shows.
            return match fs::remove_dir_all(folder) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(Error::Store { action: "delete", object: self.name(path), reason: error.to_string() })
                }
                _ => Ok(()),
            };
        }
        let (objects, location) = (self.objects.clone(), self.locate(path)?);
        let deleted = self.start("delete", path, async move {
            let found = objects.list(Some(&location)).map_ok(|meta| meta.location).boxed();
            objects.delete_stream(found).try_for_each(|_| async { Ok(()) }).await
        });
        absent_is_empty(deleted?.wait())
    }

    /// Starts to write an object in a stream: it is there, whole, once [`Writer::finish`] has returned.
    ///
    /// # Errors
    /// [`Error::Address`] when the path is none.
    pub fn writer(&self, path: &str) -> Result<Writer> {
        self.locate(path)?;
        Ok(Writer::new(self.clone(), path))
    }

    pub(crate) fn start<T: Send + 'static>(
        &self,
        action: &'static str,
        path: &str,
        work: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<Pending<T>> {
        Pending::start(action, self.name(path), self.timeout, work)
    }

    /// Where an object of this path is in the store behind.
    pub(crate) fn locate(&self, path: &str) -> Result<Path> {
        let bad =
            |error: object_store::path::Error| Error::Address { address: self.name(path), reason: error.to_string() };
        Ok(self.prefix.parts().chain(Path::parse(path).map_err(bad)?.parts()).collect())
    }

    fn relative(&self, location: &Path) -> Option<String> {
        let parts: Vec<_> = location.prefix_match(&self.prefix)?.collect();
        Some(parts.iter().map(AsRef::as_ref).collect::<Vec<_>>().join("/"))
    }
}

fn absent_is_empty<T: Default>(result: Result<T>) -> Result<T> {
    match result {
        Err(Error::NotFound { .. }) => Ok(T::default()),
        other => other,
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.address)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("address", &self.address).field("timeout", &self.timeout).finish_non_exhaustive()
    }
}
