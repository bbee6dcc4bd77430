//! Objects of a store, by address.

use std::io::{self, Read};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use futures::TryStreamExt;
use object_store::{GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, ObjectStoreScheme};
use tokio::runtime::Runtime;
use url::Url;

use crate::error::{Error, Result, panic_message};
use crate::read::Location;
use crate::source::{Found, glob, split_glob};

/// Bytes that one request asks for: large enough that its latency hardly counts, small enough to hold.
const REQUEST: u64 = 8 << 20;

/// The loader is synchronous; this drives the requests of the store, on whichever thread waits for one.
static RUNTIME: LazyLock<io::Result<Runtime>> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_all().build());

fn wait<T>(work: impl Future<Output = object_store::Result<T>>) -> io::Result<T> {
    let runtime = RUNTIME.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    Ok(runtime.block_on(work)?)
}

/// One object, as it was when it was listed.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    store: Arc<dyn ObjectStore>,
    meta: ObjectMeta,
}

/// The objects that an address names, in the order of their paths.
pub(crate) fn list(pattern: &str) -> Result<Vec<Found>> {
    // The caller may itself run inside an asynchronous runtime, where waiting is refused; a thread of our own never is.
    let listed = std::thread::scope(|scope| scope.spawn(|| list_here(pattern)).join());
    listed.unwrap_or_else(|panic| Err(Error::Thread { thread: "object store", reason: panic_message(&*panic) }))
}

fn list_here(pattern: &str) -> Result<Vec<Found>> {
    let bad = |reason: String| Error::Pattern { pattern: pattern.to_owned(), reason };
    let failed = |source: io::Error| Error::Io { action: "list", path: pattern.to_owned(), source };

    // Only the part before the first wildcard is an address: a `?` after it is a wildcard, not a query.
    let (base, rest) = split_glob(pattern);
    let url = Url::parse(base).map_err(|error| bad(error.to_string()))?;
    let (scheme, _) = ObjectStoreScheme::parse(&url).map_err(|error| bad(error.to_string()))?;
    if let Some(feature) = missing_feature(&scheme) {
        return Err(Error::FeatureOff { path: pattern.to_owned(), feature });
    }
    let (store, base) = object_store::parse_url_opts(&url, settings(&url)).map_err(|error| bad(error.to_string()))?;
    let store: Arc<dyn ObjectStore> = store.into();

    let matcher = if rest.is_empty() { None } else { Some(glob(rest, pattern)?) };
    if matcher.is_none() {
        match wait(store.head(&base)) {
            Ok(meta) => return Ok(vec![found(&url, Object { store, meta })]),
            // Then it may be a folder. Some stores refuse to look a folder up, in words of their own.
            Err(error) if error.kind() == io::ErrorKind::NotFound || pattern.ends_with('/') => {}
            Err(error) if scheme == ObjectStoreScheme::Local => tracing::debug!(%error, "not a file"),
            Err(error) => return Err(failed(error)),
        }
    }
    let mut objects: Vec<ObjectMeta> = match wait(store.list(Some(&base)).try_collect()) {
        Ok(objects) => objects,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(failed(error)),
    };
    objects.retain(|meta| {
        let below: Vec<_> = meta.location.prefix_match(&base).into_iter().flatten().collect();
        let names: Vec<&str> = below.iter().map(AsRef::as_ref).collect();
        let hidden = names.iter().any(|name| name.starts_with('.'));
        !hidden && matcher.as_ref().is_none_or(|glob| glob.is_match(names.join("/")))
    });
    objects.sort_by(|a, b| a.location.as_ref().split('/').cmp(b.location.as_ref().split('/')));
    if objects.is_empty() {
        return Err(match matcher {
            Some(_) => Error::NoMatch { pattern: pattern.to_owned() },
            None => Error::NotFound { path: pattern.to_owned() },
        });
    }
    Ok(objects.into_iter().map(|meta| found(&url, Object { store: store.clone(), meta })).collect())
}

fn found(url: &Url, object: Object) -> Found {
    let meta = &object.meta;
    let version = meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339());
    let stamp = format!("{} {version}", meta.size);
    let name = format!("{}/{}", &url[..url::Position::BeforePath], meta.location);
    Found { name, stamp, location: Location::Object(object) }
}

/// Credentials and endpoints, from the variables that the clouds' own tools read.
fn settings(url: &Url) -> Vec<(String, String)> {
    let ours = |name: &str| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|prefix| name.starts_with(prefix));
    let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let variables = variables.filter(|(name, _)| ours(name));
    let mut settings: Vec<_> = variables.filter_map(|(name, value)| Some((name, value.into_string().ok()?))).collect();
    if url.scheme() == "http" {
        // Whoever writes such an address means it.
        settings.push(("allow_http".to_owned(), "true".to_owned()));
    }
    settings
}

fn missing_feature(scheme: &ObjectStoreScheme) -> Option<&'static str> {
    match scheme {
        ObjectStoreScheme::AmazonS3 if cfg!(not(feature = "s3")) => Some("s3"),
        ObjectStoreScheme::GoogleCloudStorage if cfg!(not(feature = "gcs")) => Some("gcs"),
        ObjectStoreScheme::MicrosoftAzure if cfg!(not(feature = "azure")) => Some("azure"),
        ObjectStoreScheme::Http if cfg!(not(feature = "http")) => Some("http"),
        _ => None,
    }
}

impl Object {
    #[cfg(feature = "parquet")]
    pub(crate) fn size(&self) -> u64 {
        self.meta.size
    }

    /// One request: up to `length` bytes from `offset` on, fewer only at the end. An object that was replaced since it was
    /// listed is an error, so that a text is never put together from two versions.
    fn request(&self, offset: u64, length: u64) -> io::Result<Vec<u8>> {
        let end = offset.saturating_add(length).min(self.meta.size);
        if offset >= end {
            return Ok(Vec::new());
        }
        let options = GetOptions {
            if_match: self.meta.e_tag.clone(),
            range: Some((offset..end).into()),
            ..GetOptions::default()
        };
        let bytes = wait(async { self.store.get_opts(&self.meta.location, options).await?.bytes().await })?;
        if bytes.len() as u64 != end - offset {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes.into())
    }

    pub(crate) fn open(&self) -> ObjectFile {
        ObjectFile { object: self.clone(), block: Mutex::new((0, Vec::new())) }
    }
}

/// An object that is read at any offset. The block of the last request is kept, so that reading on costs a request per
/// block, however small the steps are.
pub(crate) struct ObjectFile {
    object: Object,
    /// Where the block begins, and its bytes.
    block: Mutex<(u64, Vec<u8>)>,
}

impl ObjectFile {
    /// Reads at least a byte into `into`, unless `offset` is at the end.
    pub(crate) fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, bytes) = &*block;
        if !(*start..start + bytes.len() as u64).contains(&offset) {
            *block = (offset, self.object.request(offset, REQUEST.max(into.len() as u64))?);
        }
        let (start, bytes) = &*block;
        let mut rest = bytes.get((offset - start) as usize..).unwrap_or(&[]);
        rest.read(into)
    }
}

/// Reads an object from its beginning.
pub(crate) struct ObjectReader {
    pub(crate) file: ObjectFile,
    pub(crate) offset: u64,
}

impl Read for ObjectReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(self.offset, into)?;
        self.offset += read as u64;
        Ok(read)
    }
}
