//! A store that fails on purpose: at one write, in one way.

#![allow(unreachable_pub, clippy::unwrap_used)]

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};

/// What happens at a write.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Fault {
    /// It is refused; later ones work.
    Error,
    /// It is refused for want of space, and so are all later ones that bring bytes.
    Full,
    /// It has no answer, ever.
    Hang,
    /// It is done, but the answer is an error.
    Lost,
    /// It is done, but for one bit of this byte.
    Flip(usize),
    /// The process dies: neither it nor anything later happens.
    Kill,
    /// The process dies in the middle of it, and the object remains with so many bytes of what was given.
    Torn(usize),
}

/// One process's way to a store. Clones are the same.
#[derive(Clone, Debug)]
pub struct Faulty(Arc<State>);

#[derive(Debug)]
struct State {
    inner: Arc<dyn ObjectStore>,
    fault: Option<(usize, Fault)>,
    writes: AtomicUsize,
    dead: AtomicBool,
    full: AtomicBool,
    log: Mutex<Vec<(String, usize)>>,
}

impl Faulty {
    /// Over `inner`; at the write of this number, in the order in which they come, the fault.
    pub fn new(inner: Arc<dyn ObjectStore>, fault: Option<(usize, Fault)>) -> Self {
        let (writes, dead, full) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        Faulty(Arc::new(State { inner, fault, writes, dead, full, log: Mutex::default() }))
    }

    /// The writes that came: where to, and how many bytes.
    pub fn log(&self) -> Vec<(String, usize)> {
        self.0.log.lock().unwrap().clone()
    }

    fn alive(&self) -> Result<()> {
        if self.0.dead.load(Ordering::SeqCst) { Err(dead()) } else { Ok(()) }
    }

    /// Counts a write; gives what is to happen at it.
    fn next(&self, location: &Path, bytes: usize) -> Result<Option<Fault>> {
        self.alive()?;
        self.0.log.lock().unwrap().push((location.to_string(), bytes));
        let number = self.0.writes.fetch_add(1, Ordering::SeqCst);
        let fault = self.0.fault.filter(|(at, _)| *at == number).map(|(_, fault)| fault);
        match fault {
            Some(Fault::Kill | Fault::Torn(_)) => self.0.dead.store(true, Ordering::SeqCst),
            Some(Fault::Full) => self.0.full.store(true, Ordering::SeqCst),
            _ => {}
        }
        if self.0.full.load(Ordering::SeqCst) && bytes > 0 {
            return Err(error(io::ErrorKind::StorageFull.into()));
        }
        Ok(fault)
    }

    /// A write whose whole is `before` and then `now`; `put` does it with other bytes.
    async fn write<T>(
        &self,
        location: &Path,
        before: Bytes,
        now: Bytes,
        put: impl AsyncFnOnce(Bytes) -> Result<T>,
    ) -> Result<T> {
        match self.next(location, now.len())? {
            None | Some(Fault::Full) => put(now).await,
            Some(Fault::Error) => Err(error(io::Error::other("the store is out of order"))),
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Lost) => {
                put(now).await?;
                Err(error(io::ErrorKind::ConnectionReset.into()))
            }
            Some(Fault::Flip(at)) => {
                let mut now = BytesMut::from(now);
                if let Some(byte) = now.get_mut(at) {
                    *byte ^= 4;
                }
                put(now.freeze()).await
            }
            Some(Fault::Kill) => Err(dead()),
            Some(Fault::Torn(length)) => {
                let torn = [&before[..], &now[..length.min(now.len())]].concat();
                self.0.inner.put(location, torn.into()).await?;
                Err(dead())
            }
        }
    }
}

fn dead() -> Error {
    error(io::Error::other("the process is dead"))
}

fn error(source: io::Error) -> Error {
    Error::Generic { store: "faulty", source: source.into() }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "faulty")
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let put = async |bytes: Bytes| self.0.inner.put_opts(location, bytes.into(), opts).await;
        self.write(location, Bytes::new(), payload.into(), put).await
    }

    async fn put_multipart_opts(&self, to: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.alive()?;
        Ok(Box::new(Upload { store: self.clone(), location: to.clone(), parts: Arc::default() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.alive()?;
        self.0.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let delete = move |location: Result<Path>| {
            let store = store.clone();
            async move {
                let location = location?;
                let delete = async |_| store.0.inner.delete(&location).await;
                store.write(&location, Bytes::new(), Bytes::new(), delete).await?;
                Ok(location)
            }
        };
        locations.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.alive()?;
        self.0.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(error(io::ErrorKind::Unsupported.into()))
    }
}

/// An upload whose parts are kept until it is complete.
#[derive(Debug)]
struct Upload {
    store: Faulty,
    location: Path,
    parts: Arc<Mutex<Vec<u8>>>,
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (store, location, parts) = (self.store.clone(), self.location.clone(), self.parts.clone());
        // Parts are kept in the order in which they are given, whenever they are done.
        let (before, now) = (Bytes::from(parts.lock().unwrap().clone()), Bytes::from(data));
        parts.lock().unwrap().extend_from_slice(&now);
        Box::pin(async move {
            let start = before.len();
            let keep = async |bytes: Bytes| {
                parts.lock().unwrap()[start..start + bytes.len()].copy_from_slice(&bytes);
                Ok(())
            };
            store.write(&location, before, now, keep).await
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let whole = Bytes::from(std::mem::take(&mut *self.parts.lock().unwrap()));
        let put = async |bytes: Bytes| self.store.0.inner.put(&self.location, bytes.into()).await;
        self.store.write(&self.location, Bytes::new(), whole, put).await
    }

    async fn abort(&mut self) -> Result<()> {
        Ok(())
    }
}
