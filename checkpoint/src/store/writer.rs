//! Objects written in a stream.

use std::collections::VecDeque;
use std::mem;

use bytes::{Bytes, BytesMut};
use object_store::{MultipartUpload, ObjectStoreExt};

use super::{Pending, Store};
use crate::Result;

/// Bytes of one request. Services want at least 5 MiB and at most 10 000 requests an object.
const REQUEST: usize = 8 << 20;
/// Requests under way at once.
const CONCURRENT: usize = 4;

/// Writes one object in a stream, in memory of a few requests' bytes, whatever its length. Dropping it unfinished leaves
/// no object.
#[derive(Debug)]
pub struct Writer {
    store: Store,
    path: String,
    /// What the next request carries: its first `filled` bytes.
    buffer: BytesMut,
    filled: usize,
    /// Absent until the object turns out larger than one request.
    upload: Option<Box<dyn MultipartUpload>>,
    /// Requests under way with what they carry, so that its memory serves again.
    flying: VecDeque<(Pending<()>, Bytes)>,
}

impl Writer {
    pub(super) fn new(store: Store, path: &str) -> Self {
        let (buffer, flying) = (BytesMut::zeroed(REQUEST), VecDeque::new());
        Writer { store, path: path.to_owned(), buffer, filled: 0, upload: None, flying }
    }

    /// Writes `length` bytes that `fill` puts into the slices that it is given, one after the other; what they hold
    /// before is undefined.
    ///
    /// # Errors
    /// Those of `fill`, and the store's, also of earlier writes.
    pub fn write_with(&mut self, length: usize, mut fill: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        let mut left = length;
        while left > 0 {
            if self.filled == REQUEST {
                self.send()?;
            }
            let end = REQUEST.min(self.filled.saturating_add(left));
            fill(&mut self.buffer[self.filled..end])?;
            left -= end - self.filled;
            self.filled = end;
        }
        Ok(())
    }

    /// Writes these bytes.
    ///
    /// # Errors
    /// The store's, also of earlier writes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        self.write_with(bytes.len(), |out| {
            let (now, later) = rest.split_at(out.len());
            out.copy_from_slice(now);
            rest = later;
            Ok(())
        })
    }

    /// Ends the object, which exists from then on.
    ///
    /// # Errors
    /// The store's, also of earlier writes. There is no object then.
    pub fn finish(mut self) -> Result<()> {
        if self.upload.is_none() {
            self.buffer.truncate(self.filled);
            return self.store.put(&self.path, mem::take(&mut self.buffer).freeze());
        }
        if self.filled > 0 {
            self.send()?;
        }
        while let Some((request, _)) = self.flying.pop_front() {
            request.wait()?;
        }
        match self.upload.take() {
            Some(mut upload) => {
                let completed = self.store.start("write", &self.path, async move { upload.complete().await.map(drop) });
                completed?.wait()
            }
            None => Ok(()),
        }
    }

    /// Sends what the buffer holds, and takes another buffer, once few enough are under way.
    fn send(&mut self) -> Result<()> {
        let upload = match &mut self.upload {
            Some(upload) => upload,
            none => {
                let (objects, location) = (self.store.objects.clone(), self.store.locate(&self.path)?);
                let begun =
                    self.store.start("write", &self.path, async move { objects.put_multipart(&location).await })?;
                none.insert(begun.wait()?)
            }
        };
        self.buffer.truncate(self.filled);
        self.filled = 0;
        let content = mem::take(&mut self.buffer).freeze();
        let sent = self.store.start("write", &self.path, upload.put_part(content.clone().into()))?;
        self.flying.push_back((sent, content));
        let mut free = None;
        if self.flying.len() >= CONCURRENT
            && let Some((request, content)) = self.flying.pop_front()
        {
            request.wait()?;
            // The store may hold on to it a little longer; then a new one does as well.
            free = content.try_into_mut().ok().filter(|buffer| buffer.len() == REQUEST);
        }
        self.buffer = free.unwrap_or_else(|| BytesMut::zeroed(REQUEST));
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(mut upload) = self.upload.take() {
            // Frees what the service holds of it. Nobody waits for that, nor could do anything about a failure.
            let _ = self.store.start("abort", &self.path, async move { upload.abort().await });
        }
    }
}
