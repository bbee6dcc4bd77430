//! What is in a step: the JSON that makes it exist, and the one that each rank contributes.

use std::collections::BTreeMap;

use bytes::Bytes;
use ferrotitan_mesh::Region;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::boxes::check_cover;
use crate::{Dtype, Error, Result, Store, TensorInfo};

/// The manifest of a step, in its folder.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Bytes of a part under one checksum; the last of a part has fewer.
pub(crate) const CHUNK: u64 = 1 << 20;
/// The most bytes of a manifest or an index.
pub(crate) const LIMIT: u64 = 1 << 30;
const FORMAT: &str = "ferrotitan checkpoint";
const VERSION: u32 = 1;

/// The manifest of a step; or, without state, what one rank contributes to it.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Manifest {
    format: String,
    version: u32,
    pub(crate) step: u64,
    pub(crate) state: serde_json::Value,
    pub(crate) tensors: BTreeMap<String, Entry>,
    pub(crate) files: BTreeMap<String, File>,
}

/// A file in the folder of a step: a safetensors file whose tensors are parts.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[non_exhaustive]
pub struct File {
    /// All its bytes.
    pub bytes: u64,
    /// Those before its tensors.
    pub header_bytes: u64,
    /// The CRC-32C of those.
    pub header_crc32c: u32,
}

/// One tensor.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Entry {
    pub(crate) dtype: Dtype,
    /// The global shape.
    pub(crate) shape: Vec<usize>,
    pub(crate) parts: Vec<Part>,
}

/// A box of a tensor, and where its bytes are.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[non_exhaustive]
pub struct Part {
    /// The file, in the folder of the step.
    pub file: String,
    /// The first of its bytes in the file, and the one after the last: row-major, little-endian.
    pub bytes: (u64, u64),
    /// Its first index along each axis of the tensor.
    pub offset: Vec<usize>,
    /// Its length along each axis.
    pub shape: Vec<usize>,
    /// The CRC-32C of each of its mebibytes.
    pub crc32c: Vec<u32>,
}

impl Part {
    /// The box.
    pub fn region(&self) -> Region {
        Region { offset: self.offset.clone(), shape: self.shape.clone() }
    }
}

impl Manifest {
    /// One without tensors.
    pub(crate) fn new(step: u64, state: serde_json::Value) -> Self {
        let (tensors, files) = (BTreeMap::new(), BTreeMap::new());
        Manifest { format: FORMAT.to_owned(), version: VERSION, step, state, tensors, files }
    }

    /// Reads a manifest or a contribution to it, and checks that it is of this format and step. What it says of tensors
    /// is not checked.
    pub(crate) fn read(store: &Store, path: &str, step: u64) -> Result<Self> {
        let object = store.name(path);
        let damaged = |reason: String| Error::Damaged { object: object.clone(), reason };
        let manifest: Manifest = unseal(&object, &store.get(path, LIMIT)?)?;
        if manifest.format != FORMAT || manifest.version != VERSION {
            let reason = format!("it is {:?} of version {}", manifest.format, manifest.version);
            return Err(damaged(format!("{reason}, where this build reads {FORMAT:?} of version {VERSION}")));
        }
        if manifest.step != step {
            return Err(damaged(format!("it is that of step {}", manifest.step)));
        }
        Ok(manifest)
    }

    /// Adds what another rank wrote. The two must agree in what a tensor is.
    pub(crate) fn merge(&mut self, other: Manifest) -> Result<()> {
        self.files.extend(other.files);
        for (name, entry) in other.tensors {
            let Some(known) = self.tensors.get_mut(&name) else {
                self.tensors.insert(name, entry);
                continue;
            };
            if known.info() != entry.info() {
                let (ours, theirs) = (known.info(), entry.info());
                let reason = format!(
                    "ranks disagree whether it is {} {:?} or {} {:?}",
                    ours.dtype, ours.shape, theirs.dtype, theirs.shape
                );
                return Err(Error::Coverage { tensor: name, reason });
            }
            known.parts.extend(entry.parts);
        }
        Ok(())
    }

    /// Checks everything that readers rely on: that each tensor is wholly there, once, and that its parts are where
    /// they can be. Else says what does not hold of which tensor.
    pub(crate) fn check(&self) -> Result<(), (&str, String)> {
        for (name, entry) in &self.tensors {
            entry.check(&self.files).map_err(|reason| (name.as_str(), reason))?;
        }
        Ok(())
    }
}

impl Entry {
    pub(crate) fn info(&self) -> TensorInfo {
        TensorInfo { shape: self.shape.clone(), dtype: self.dtype }
    }

    fn check(&self, files: &BTreeMap<String, File>) -> Result<(), String> {
        let info = self.info();
        info.bytes().ok_or_else(|| format!("the shape {:?} is too large", self.shape))?;
        let whole = Region::whole(&self.shape);
        let regions: Vec<_> = self.parts.iter().map(Part::region).collect();
        for (part, region) in self.parts.iter().zip(&regions) {
            let file = &part.file;
            let there = files.get(file).ok_or_else(|| format!("its file {file} is not listed"))?.bytes;
            if region.offset.len() != region.shape.len() || region.numel() == 0 || !whole.contains(region) {
                return Err(format!("it has no part {region:?}"));
            }
            let (start, end) = part.bytes;
            let bytes = info.bytes_of(&region.shape).map(|bytes| bytes as u64);
            if end > there || end.checked_sub(start) != bytes {
                return Err(format!("bytes {start} to {end} of {file} cannot be its part {region:?}"));
            }
            if part.crc32c.len() as u64 != (end - start).div_ceil(CHUNK) {
                return Err(format!("its part {region:?} has {} checksums", part.crc32c.len()));
            }
        }
        check_cover(&self.shape, &regions.iter().collect::<Vec<_>>())
    }
}

/// How a sealed object ends: a checksum of what stands before, and what ends the JSON.
const SEAL: (&[u8], &[u8]) = (b",\"crc32c\":\"", b"\"}\n");
const SEAL_BYTES: usize = SEAL.0.len() + 8 + SEAL.1.len();

/// A JSON object with a last member of its own: the CRC-32C of all bytes before the comma.
pub(crate) fn seal(value: &impl Serialize) -> Result<Bytes> {
    let refused =
        |error: serde_json::Error| Error::Unsupported { what: "this state".to_owned(), reason: error.to_string() };
    let mut json = serde_json::to_vec(value).map_err(refused)?;
    json.pop();
    let sum = format!("{:08x}", crc32c::crc32c(&json));
    for part in [SEAL.0, sum.as_bytes(), SEAL.1] {
        json.extend_from_slice(part);
    }
    Ok(json.into())
}

/// The value in a sealed object.
pub(crate) fn unseal<T: DeserializeOwned>(object: &str, bytes: &[u8]) -> Result<T> {
    let damaged = |reason: String| Error::Damaged { object: object.to_owned(), reason };
    let (content, sum) = split_seal(bytes)
        .ok_or_else(|| damaged("it does not end as it should, so part of it is missing".to_owned()))?;
    if sum != crc32c::crc32c(content) {
        return Err(damaged("its checksum is another than when it was written".to_owned()));
    }
    serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))
}

fn split_seal(bytes: &[u8]) -> Option<(&[u8], u32)> {
    let (content, seal) = bytes.split_at(bytes.len().checked_sub(SEAL_BYTES)?);
    let sum = seal.strip_prefix(SEAL.0)?.strip_suffix(SEAL.1)?;
    Some((content, u32::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?))
}

/// Whether a step is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Presence {
    /// It has no manifest.
    Absent,
    /// Its manifest was not written to its end.
    Torn,
    /// It is there, though it may be damaged.
    There,
}

/// Whether the step whose folder this is exists.
pub(crate) fn presence(step: &Store) -> Result<Presence> {
    let bytes = match step.size(MANIFEST) {
        Ok(bytes) => bytes,
        Err(Error::NotFound { .. }) => return Ok(Presence::Absent),
        Err(error) => return Err(error),
    };
    if bytes < SEAL_BYTES as u64 {
        return Ok(Presence::Torn);
    }
    let end = step.get_range(MANIFEST, bytes - SEAL_BYTES as u64..bytes)?;
    Ok(if split_seal(&end).is_some() { Presence::There } else { Presence::Torn })
}
