//! Building a token store: one thread reads, all cores tokenize, the caller's thread writes.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::error::{Error, Result, panic_message};
use crate::read::{Piece, Text, piece_end, read_item, text_of_line};
use crate::source::{Listing, Source};
use crate::store::{FORMAT, INDEX, LOCK, MANIFEST, Manifest, TOKENS, TokenStore, hex, index, width};
use crate::tokenizer::Tokenizer;

/// Text that waits for each core. Three times this is in memory: being read, waiting, being tokenized.
const BYTES_PER_THREAD: usize = 2 << 20;

/// How often a process looks whether another has finished building.
const POLL: Duration = Duration::from_millis(50);

/// What of a source is tokenized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BuildOptions {
    /// Stop with the document that brings the text to so many bytes. Documents stay whole.
    pub max_bytes: Option<u64>,
}

/// How far building a store has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Another process or thread is building the same store.
    Waiting,
    /// This one is.
    Building {
        /// Files or packages that were read.
        items: usize,
        /// Files or packages there are.
        total_items: usize,
        /// Documents that were tokenized.
        documents: u64,
        /// Tokens so far.
        tokens: u64,
        /// Bytes of text so far.
        text_bytes: u64,
    },
}

impl TokenStore {
    /// Opens the store of a source below the folder `cache`, and builds it first where it is missing or damaged.
    ///
    /// The store's folder is named by a hash of everything that decides its content: the list of files with their sizes
    /// and modification times (entity tags for objects, checksums for packages), the options, the tokenizer and the
    /// format's version. So a changed source gets a new store; old ones stay until someone deletes them, which is
    /// always safe.
    ///
    /// Of all processes and threads that ask for one store at the same time, one builds it and the others wait. The
    /// lock is the operating system's (`flock`) and ends with its process. On a file system without such locks, or one
    /// that does not share them between machines, several may build at once: each writes its own files and moves them
    /// into place, and all write the same bytes.
    ///
    /// `progress` is called every few megabytes of text, or while waiting; where it returns [`ControlFlow::Break`], the
    /// call ends with [`Error::Cancelled`].
    ///
    /// # Errors
    /// Whatever is wrong with the source, in the order of its documents; [`Error::Empty`]; [`Error::Io`]. No store is
    /// left behind.
    pub fn open_or_build(
        source: &Source,
        tokenizer: &dyn Tokenizer,
        cache: impl AsRef<Path>,
        options: BuildOptions,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Self> {
        let listing = source.list()?;
        let fingerprint = fingerprint(&listing, tokenizer, options);
        let folder = cache.as_ref().join(&fingerprint[..32]);
        let open = || match Self::open(&folder) {
            Ok(store) if store.fingerprint() == fingerprint => Some(store),
            Ok(_) => None,
            Err(error) => {
                if folder.join(MANIFEST).exists() {
                    tracing::warn!(%error, "rebuilding a token store");
                }
                None
            }
        };
        if let Some(store) = open() {
            return Ok(store);
        }
        if !listing.missing.is_empty() {
            return Err(Error::MissingPackages { registry: listing.registry, names: listing.missing });
        }
        std::fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        let lock = lock(&folder, progress)?;
        // Whoever held the lock before may have built it.
        if let Some(store) = open() {
            return Ok(store);
        }
        if lock.is_some() {
            remove_partial(&folder);
        }
        tracing::info!(folder = %folder.display(), items = listing.items.len(), "tokenizing");
        build(&listing, tokenizer, &folder, options, fingerprint, progress)?;
        Self::open(&folder)
    }
}

fn fingerprint(listing: &Listing, tokenizer: &dyn Tokenizer, options: BuildOptions) -> String {
    let mut hash = Sha256::new();
    let mut field = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    field(&FORMAT.to_string());
    field(&tokenizer.identity());
    field(&format!("{} {:?} {:?}", tokenizer.vocab_size(), tokenizer.bos(), tokenizer.eos()));
    field(&format!("{:?}", options.max_bytes));
    field(&listing.options);
    for item in &listing.items {
        field(&item.name);
        field(&item.stamp);
    }
    hex(&hash.finalize())
}

/// Waits until this is the only builder of a folder. Without the lock, nothing but work is lost.
fn lock(folder: &Path, progress: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<Option<Flock<File>>> {
    let path = folder.join(LOCK);
    let mut file = File::create(&path).map_err(Error::io("create", &path))?;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((unlocked, Errno::EWOULDBLOCK | Errno::EINTR)) => file = unlocked,
            Err((_, error)) => {
                tracing::warn!(path = %path.display(), %error, "no lock: others may build the same store");
                return Ok(None);
            }
        }
        if progress(Progress::Waiting).is_break() {
            return Err(Error::Cancelled);
        }
        std::thread::sleep(POLL);
    }
}

/// Pieces that are tokenized together, and how many items are read when they are.
struct Batch {
    pieces: Vec<Piece>,
    items: usize,
    skipped: u64,
}

fn build(
    listing: &Listing,
    tokenizer: &dyn Tokenizer,
    folder: &Path,
    options: BuildOptions,
    fingerprint: String,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<()> {
    let vocab_size = tokenizer.vocab_size();
    let mut writer = Writer::new(folder, vocab_size, options.max_bytes.unwrap_or(u64::MAX))?;
    let (mut items, mut skipped) = (0, 0);
    std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel(1);
        let reader = std::thread::Builder::new().name("corpus-reader".to_owned());
        let reader = reader.spawn_scoped(scope, move || read_all(listing, &sender));
        let reader = reader.map_err(Error::io("start a thread for", folder))?;
        let mut consume = || -> Result<()> {
            while let Ok(batch) = receiver.recv() {
                let batch: Batch = batch?;
                (items, skipped) = (batch.items, batch.skipped);
                let encoded = batch.pieces.into_par_iter().map(|piece| encode(tokenizer, piece));
                for encoded in encoded.collect::<Vec<_>>() {
                    if writer.append(&encoded?)?.is_break() {
                        return Ok(());
                    }
                }
                if progress(writer.progress(items, listing.items.len())).is_break() {
                    return Err(Error::Cancelled);
                }
            }
            Ok(())
        };
        let result = consume();
        // The reader's next attempt to hand something over fails, and it ends.
        drop(receiver);
        match reader.join() {
            Ok(()) => result,
            Err(panic) => Err(Error::Thread { thread: "corpus reader", reason: panic_message(&*panic) }),
        }
    })?;
    if writer.documents() == 0 {
        return Err(Error::Empty { items, skipped });
    }
    let manifest = Manifest {
        format: FORMAT,
        fingerprint,
        tokenizer: tokenizer.identity(),
        vocab_size,
        width: width(vocab_size),
        tokens: writer.tokens,
        documents: writer.documents(),
        text_bytes: writer.text_bytes,
        skipped,
    };
    writer.finish(folder, &manifest)
}

/// Reads all items in order and sends their pieces on, in batches of enough text for all cores.
fn read_all(listing: &Listing, sender: &SyncSender<Result<Batch>>) {
    let limit = BYTES_PER_THREAD * rayon::current_num_threads();
    let (mut pieces, mut bytes, mut skipped) = (Vec::new(), 0, 0);
    for (items, item) in listing.items.iter().enumerate() {
        let read = read_item(item, &mut |piece| {
            bytes += piece.bytes();
            pieces.push(piece);
            if bytes >= limit {
                bytes = 0;
                let pieces = std::mem::take(&mut pieces);
                sender.send(Ok(Batch { pieces, items, skipped })).map_err(|_| Error::Cancelled)?;
            }
            Ok(())
        });
        match read {
            Ok(left_out) => skipped += left_out,
            Err(error) => {
                // What came before the error may hold an earlier one, and the first is the one to report. Where nobody
                // receives any more, there is nobody to tell.
                let _ = sender.send(Ok(Batch { pieces, items, skipped })).and_then(|()| sender.send(Err(error)));
                return;
            }
        }
    }
    let _ = sender.send(Ok(Batch { pieces, items: listing.items.len(), skipped }));
}

/// A piece as it lies in the store.
struct Encoded {
    bytes: Vec<u8>,
    tokens: u64,
    text_bytes: u64,
    last: bool,
}

fn encode(tokenizer: &dyn Tokenizer, piece: Piece) -> Result<Encoded> {
    let text = match piece.text {
        Text::Plain(text) => text,
        Text::JsonLine { bytes, line, field } => text_of_line(&bytes, &field, &piece.path, line)?.unwrap_or_default(),
    };
    let vocab_size = tokenizer.vocab_size();
    let wide = width(vocab_size) == 4;
    let mut encoded = Encoded { bytes: Vec::new(), tokens: 0, text_bytes: text.len() as u64, last: piece.last };
    if text.is_empty() {
        return Ok(encoded);
    }
    let mut push = |token: u32| {
        if token as usize >= vocab_size {
            let reason = format!("it made token {token}, but says that its vocabulary has {vocab_size}");
            return Err(Error::Tokenizer { name: tokenizer.identity(), reason });
        }
        encoded.tokens += 1;
        let bytes = token.to_le_bytes();
        encoded.bytes.extend_from_slice(if wide { &bytes } else { &bytes[..2] });
        Ok(())
    };
    if piece.first {
        tokenizer.bos().into_iter().try_for_each(&mut push)?;
    }
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let (head, tail) = rest.split_at(piece_end(rest.as_bytes()));
        tokenizer.encode(head)?.into_iter().try_for_each(&mut push)?;
        rest = tail;
    }
    if piece.last {
        tokenizer.eos().into_iter().try_for_each(&mut push)?;
    }
    Ok(encoded)
}

/// Puts pieces together to documents, in a file that becomes part of the store when all is there.
struct Writer {
    file: BufWriter<NamedTempFile>,
    /// Where each finished document begins, and where the last one ends.
    starts: Vec<u64>,
    tokens: u64,
    text_bytes: u64,
    max_bytes: u64,
    width: u64,
}

impl Writer {
    fn new(folder: &Path, vocab_size: usize, max_bytes: u64) -> Result<Self> {
        let file = partial(folder).map_err(Error::io("write into", folder))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        Ok(Self { file, starts: vec![0], tokens: 0, text_bytes: 0, max_bytes, width: width(vocab_size) })
    }

    fn documents(&self) -> u64 {
        self.starts.len() as u64 - 1
    }

    fn progress(&self, items: usize, total_items: usize) -> Progress {
        let (documents, tokens, text_bytes) = (self.documents(), self.tokens, self.text_bytes);
        Progress::Building { items, total_items, documents, tokens, text_bytes }
    }

    /// Breaks once there is enough text.
    fn append(&mut self, piece: &Encoded) -> Result<ControlFlow<()>> {
        debug_assert_eq!(piece.bytes.len() as u64, piece.tokens * self.width);
        self.file.write_all(&piece.bytes).map_err(Error::io("write", self.file.get_ref().path()))?;
        self.tokens += piece.tokens;
        self.text_bytes += piece.text_bytes;
        if !piece.last {
            return Ok(ControlFlow::Continue(()));
        }
        // A text without tokens is no document: it would be a boundary that nothing lies between.
        if self.starts.last() != Some(&self.tokens) {
            self.starts.push(self.tokens);
        }
        Ok(if self.text_bytes >= self.max_bytes { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    /// Moves everything into place, the manifest last.
    fn finish(self, folder: &Path, manifest: &Manifest) -> Result<()> {
        let write = |name: &str, content: &dyn Fn(&mut NamedTempFile) -> io::Result<()>| {
            let mut file = partial(folder)?;
            content(&mut file)?;
            keep(file, &folder.join(name))
        };
        let done = || -> io::Result<()> {
            keep(self.file.into_inner().map_err(io::IntoInnerError::into_error)?, &folder.join(TOKENS))?;
            write(INDEX, &|file| index::write(file, &self.starts))?;
            write(MANIFEST, &|file| Ok(serde_json::to_writer_pretty(file, manifest)?))
        };
        done().map_err(Error::io("write into", folder))
    }
}

const PARTIAL: &str = "partial-";

/// A new file that disappears unless it is kept. Readable by all whom the umask lets, as caches are shared.
fn partial(folder: &Path) -> io::Result<NamedTempFile> {
    let permissions = std::fs::Permissions::from_mode(0o666);
    tempfile::Builder::new().prefix(PARTIAL).permissions(permissions).tempfile_in(folder)
}

fn keep(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

/// Removes what builders that were killed have left; only the holder of the lock knows that they are gone. That it fails
/// is no reason to fail.
fn remove_partial(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
