//! What `torch.save` writes for one tensor: a zip archive, nothing in it compressed, of a pickle that describes the tensor
//! and of its storage.

use std::ops::Range;

use bytes::Bytes;

use super::metadata::{Item, dtype};
use super::pickle::{Node, Pickle};
use crate::interchange::flaw::Flaw;
use crate::{Error, Result, Store, TensorInfo};

/// Bytes that are read of either end of an archive at once: all but the storage, as PyTorch writes it.
const END: u64 = 4 << 10;
/// A directory or a pickle of more bytes is not that of one tensor.
const LIMIT: u64 = 1 << 20;

/// Where the elements of a chunk are in its file.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// The byte of the first element.
    pub(super) start: u64,
    /// The distances of neighbours along each axis, in elements.
    pub(super) strides: Vec<usize>,
}

/// Finds the elements of a chunk that should be such as `info` says.
pub(super) fn locate(store: &Store, item: &Item, info: &TensorInfo) -> Result<Place> {
    let object = store.name(&item.path);
    if item.offset.checked_add(item.length).is_none() {
        return Err(Error::Damaged { object, reason: "an item ends beyond any file".to_owned() });
    }
    let archive = Archive::open(store, item)?;
    let entries = archive.entries()?;
    let find = |name: &str| entries.iter().find(|entry| entry.name == name);
    let damaged = |reason: String| Error::Damaged { object: object.clone(), reason };
    let folder = entries.iter().find_map(|entry| entry.name.strip_suffix("data.pkl"));
    let folder = folder.ok_or_else(|| damaged("an archive has no data.pkl".to_owned()))?;
    if let Some(order) = find(&format!("{folder}byteorder"))
        && archive.small(order)?.as_ref() != b"little"
    {
        let what = format!("the byte order of {object}");
        return Err(Error::Unsupported { what, reason: "only little-endian files can be read".to_owned() });
    }
    let pickle = find(&format!("{folder}data.pkl")).map(|entry| archive.small(entry)).transpose()?.unwrap_or_default();
    let tensor = Pickle::parse(&pickle).and_then(|pickle| describe(pickle.root(), info)).map_err(Flaw::of(&object))?;
    let storage = find(&format!("{folder}data/{}", tensor.key));
    let storage = storage.ok_or_else(|| damaged(format!("an archive has no data/{}", tensor.key)))?;
    let bytes = archive.content(storage)?;
    if tensor.bytes.end > bytes.end - bytes.start {
        return Err(damaged(format!("a tensor needs {} bytes of a storage that has fewer", tensor.bytes.end)));
    }
    Ok(Place { start: item.offset + bytes.start + tensor.bytes.start, strides: tensor.strides })
}

/// A tensor as `data.pkl` describes it.
struct Tensor {
    /// The name of its storage.
    key: String,
    /// Which bytes of the storage it uses.
    bytes: Range<u64>,
    strides: Vec<usize>,
}

fn describe(root: Node<'_>, info: &TensorInfo) -> Result<Tensor, Flaw> {
    let root = match root.class()? {
        "_rebuild_parameter" => root.call("_rebuild_parameter")?.first::<1>()?[0],
        _ => root,
    };
    // Storages have a dtype, but for those of the newer dtypes, whose tensors have it.
    let typed = root.class()? == "_rebuild_tensor_v2";
    let arguments = root.call(if typed { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" })?;
    let [storage, start, shape, strides] = arguments.first()?;
    let [_, class, key] = storage.persistent()?.first()?;
    let found = match typed {
        true => dtype(class.global()?)?,
        false => dtype(arguments.first::<7>()?[6].global()?)?,
    };
    let sizes = |node: Node<'_>| node.items()?.map(Node::size).collect::<Result<Vec<_>, _>>();
    let (shape, strides) = (sizes(shape)?, sizes(strides)?);
    if shape != info.shape || found != info.dtype || strides.len() != shape.len() {
        return Flaw::damaged(format!(
            "a tensor is {found} of shape {shape:?} and strides {strides:?}, but its chunk {} of shape {:?}",
            info.dtype, info.shape
        ));
    }
    let start = start.size()?;
    // The last element, unless there is none.
    let last = shape.iter().zip(&strides).try_fold(start, |last, (length, stride)| {
        length.saturating_sub(1).checked_mul(*stride).and_then(|far| far.checked_add(last))
    });
    let size = info.dtype.size() as u64;
    let end = last.and_then(|last| (last as u64).checked_add(1)).and_then(|end| end.checked_mul(size));
    let Some(end) = end else {
        return Flaw::damaged(format!("the strides {strides:?} lead beyond any storage"));
    };
    Ok(Tensor { key: key.str()?.to_owned(), bytes: start as u64 * size..end, strides })
}

/// An archive of which the two ends are in memory.
struct Archive<'a> {
    store: &'a Store,
    item: &'a Item,
    head: Bytes,
    tail: Bytes,
}

/// A file of an archive.
struct Entry {
    name: String,
    /// The byte of its header.
    header: u64,
    length: u64,
}

impl<'a> Archive<'a> {
    fn open(store: &'a Store, item: &'a Item) -> Result<Self> {
        let mut archive = Archive { store, item, head: Bytes::new(), tail: Bytes::new() };
        if item.length <= 2 * END {
            archive.head = archive.read(0..item.length)?;
        } else {
            archive.head = archive.read(0..END)?;
            archive.tail = archive.read(item.length - END..item.length)?;
        }
        Ok(archive)
    }

    fn damaged<T>(&self, reason: &str) -> Result<T> {
        let (object, start) = (self.store.name(&self.item.path), self.item.offset);
        Err(Error::Damaged { object, reason: format!("the archive at byte {start}: {reason}") })
    }

    fn read(&self, range: Range<u64>) -> Result<Bytes> {
        if range.start > range.end || range.end > self.item.length {
            return self.damaged("it ends too early");
        }
        let tail = self.item.length - self.tail.len() as u64;
        if range.end <= self.head.len() as u64 {
            return Ok(self.head.slice(range.start as usize..range.end as usize));
        }
        if range.start >= tail {
            return Ok(self.tail.slice((range.start - tail) as usize..(range.end - tail) as usize));
        }
        // `locate` has seen that the end of the item is a number.
        self.store.get_range(&self.item.path, self.item.offset + range.start..self.item.offset + range.end)
    }

    fn read_at(&self, start: u64, length: u64) -> Result<Bytes> {
        match start.checked_add(length) {
            Some(end) => self.read(start..end),
            None => self.damaged("it ends too early"),
        }
    }

    /// The directory, which stands at the end.
    fn entries(&self) -> Result<Vec<Entry>> {
        const END_RECORD: u64 = 22;
        const LOCATOR: u64 = 20;
        let Some(end) = self.item.length.checked_sub(END_RECORD) else {
            return self.damaged("it is too short for a zip archive");
        };
        let record = self.read_at(end, END_RECORD)?;
        if !record.starts_with(b"PK\x05\x06") {
            return self.damaged("it does not end as a zip archive");
        }
        let (mut length, mut start) = (u64::from(u32_at(&record, 12)), u64::from(u32_at(&record, 16)));
        if let Some(at) = end.checked_sub(LOCATOR)
            && let locator = self.read_at(at, LOCATOR)?
            && locator.starts_with(b"PK\x06\x07")
        {
            let record = self.read_at(u64_at(&locator, 8), 56)?;
            if !record.starts_with(b"PK\x06\x06") {
                return self.damaged("its directory is not where it should be");
            }
            (length, start) = (u64_at(&record, 40), u64_at(&record, 48));
        }
        if length > LIMIT {
            return self.damaged("it holds more than one tensor");
        }
        let directory = self.read_at(start, length)?;
        let mut entries = Vec::new();
        let mut rest = directory.as_ref();
        while !rest.is_empty() {
            let Some((entry, after)) = Entry::parse(rest) else {
                return self.damaged("its directory is damaged, or something in it is compressed");
            };
            entries.push(entry);
            rest = after;
        }
        Ok(entries)
    }

    /// Which bytes of the archive are the content of a file.
    fn content(&self, entry: &Entry) -> Result<Range<u64>> {
        const HEADER: u64 = 30;
        let header = self.read_at(entry.header, HEADER)?;
        let start = entry.header + HEADER + u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
        match start.checked_add(entry.length) {
            Some(end) if header.starts_with(b"PK\x03\x04") && end <= self.item.length => Ok(start..end),
            _ => self.damaged("a file in it is not where it should be"),
        }
    }

    /// The content of a small file.
    fn small(&self, entry: &Entry) -> Result<Bytes> {
        let content = self.content(entry)?;
        if content.end - content.start > LIMIT {
            return self.damaged("it holds more than one tensor");
        }
        self.read(content)
    }
}

impl Entry {
    /// An entry of the directory, and what follows it; `None` where it is none, or that of a compressed file.
    fn parse(bytes: &[u8]) -> Option<(Entry, &[u8])> {
        const FIXED: usize = 46;
        let fixed = bytes.get(..FIXED).filter(|fixed| fixed.starts_with(b"PK\x01\x02"))?;
        let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(u16_at(fixed, at)));
        let rest = &bytes[FIXED..];
        let (name, rest) = rest.split_at_checked(name)?;
        let (mut extra, rest) = rest.split_at_checked(extra)?;
        let (_, after) = rest.split_at_checked(comment)?;
        // Full length, stored length, header: each 32 bits, or all set where a field of 64 bits holds it.
        let mut numbers = [24, 20, 42].map(|at| u64::from(u32_at(fixed, at)));
        while let Some((field, others)) = extra.split_at_checked(4) {
            let (mut content, others) = others.split_at_checked(usize::from(u16_at(field, 2)))?;
            if u16_at(field, 0) == 1 {
                for number in numbers.iter_mut().filter(|number| **number == u64::from(u32::MAX)) {
                    let (large, others) = content.split_first_chunk()?;
                    (*number, content) = (u64::from_le_bytes(*large), others);
                }
            }
            extra = others;
        }
        let [length, stored, header] = numbers;
        let plain = u16_at(fixed, 10) == 0 && length == stored;
        let name = str::from_utf8(name).ok().filter(|_| plain)?.to_owned();
        Some((Entry { name, header, length }, after))
    }
}

// The callers have that many bytes.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
