//! PyTorch's distributed checkpoints (`torch.distributed.checkpoint`): a folder of `.metadata`, a pickle, and of
//! `__RANK_N.distcp`, files of tensors as `torch.save` writes them.
//!
//! A pickle is a program. This reader runs none: it knows the instructions and the few classes that these checkpoints
//! consist of, and refuses all else by name.

mod archive;
mod metadata;
mod pickle;

use std::collections::BTreeMap;

use ferrotitan_mesh::Region;

use self::metadata::{Chunk, Metadata, Tensor};
use super::flaw::Flaw;
use super::gather::Stored;
use crate::{Error, Result, Source, Store, TensorInfo};

pub(super) const METADATA: &str = ".metadata";
/// Far more than the metadata of any run so far.
const METADATA_LIMIT: u64 = 256 << 20;

/// A folder that `torch.distributed.checkpoint.save` wrote, read where it lies.
///
/// Names are those of the flattened state dict, such as `model.norm.weight` of `{"model": {"norm.weight": …}}`. Entries
/// that are no tensors are [named](Folder::others), but not read.
#[derive(Debug)]
pub struct Folder {
    store: Store,
    /// What stands before each name in the folder.
    prefix: String,
    infos: BTreeMap<String, TensorInfo>,
    chunks: BTreeMap<String, Vec<Chunk>>,
    others: Vec<String>,
}

impl Folder {
    /// Reads the metadata.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none; [`Error::Damaged`]; [`Error::Unsupported`] when it names anything but
    /// plain, dense tensors.
    pub fn open(store: Store) -> Result<Self> {
        let bytes = store.get(METADATA, METADATA_LIMIT)?;
        let Metadata { tensors, others } = Metadata::parse(&bytes).map_err(Flaw::of(&store.name(METADATA)))?;
        let (mut infos, mut chunks) = (BTreeMap::new(), BTreeMap::new());
        for (name, Tensor { info, chunks: of_tensor }) in tensors {
            infos.insert(name.clone(), info);
            chunks.insert(name, of_tensor);
        }
        Ok(Folder { store, prefix: String::new(), infos, chunks, others })
    }

    /// Only what lies under `prefix`, without it: `model.norm.weight` is `norm.weight` under `model.`.
    #[must_use]
    pub fn under(mut self, prefix: &str) -> Self {
        let strip = |name: String| name.strip_prefix(prefix).map(str::to_owned);
        self.infos = self.infos.into_iter().filter_map(|(name, info)| Some((strip(name)?, info))).collect();
        self.others = self.others.into_iter().filter_map(strip).collect();
        self.prefix.push_str(prefix);
        self
    }

    /// The names of the entries that are no tensors, such as the number of the step.
    pub fn others(&self) -> &[String] {
        &self.others
    }

    /// The files of a tensor's chunks, one for each.
    pub fn files(&self, name: &str) -> impl Iterator<Item = &str> {
        self.chunks_of(name).iter().map(|chunk| chunk.item.path.as_str())
    }

    fn chunks_of(&self, name: &str) -> &[Chunk] {
        self.chunks.get(&format!("{}{name}", self.prefix)).map_or(&[], Vec::as_slice)
    }

    /// Copies what a chunk has of `region`.
    fn copy_chunk(&self, chunk: &Chunk, info: &TensorInfo, region: &Region, out: &mut [u8]) -> Result<()> {
        let place = match chunk.place.get() {
            Some(place) => place,
            None => {
                let info = TensorInfo { shape: chunk.region.shape.clone(), dtype: info.dtype };
                let found = archive::locate(&self.store, &chunk.item, &info)?;
                chunk.place.get_or_init(|| found)
            }
        };
        let size = info.dtype.size();
        let (store, path) = (&self.store, chunk.item.path.as_str());
        if contiguous(&chunk.region.shape, &place.strides) {
            return Stored { store, path, start: place.start, region: &chunk.region, size }.copy_to(region, out);
        }
        // Rare: the chunk was, say, transposed. All that it spans is read at once.
        let Some(common) = chunk.region.intersect(region) else { return Ok(()) };
        let within = |index: &[usize]| -> usize {
            let axes = index.iter().zip(&chunk.region.offset).zip(&place.strides);
            axes.map(|((index, start), stride)| (index - start) * stride).sum()
        };
        let (first, last) = (within(&common.offset), within(&last(&common)));
        let bytes = |element: usize| place.start + (element * size) as u64;
        let spanned = store.get_range(path, bytes(first)..bytes(last + 1))?;
        let mut index = common.offset.clone();
        for (start, length) in common.runs_in(region) {
            for element in start..start + length {
                let from = (within(&index) - first) * size;
                out[element * size..][..size].copy_from_slice(&spanned[from..from + size]);
                advance(&mut index, &common);
            }
        }
        Ok(())
    }
}

impl Source for Folder {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.infos
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.check(name, region, out)?;
        let parts: Vec<_> =
            self.chunks_of(name).iter().filter_map(|chunk| Some((chunk, chunk.region.intersect(region)?))).collect();
        let covered = parts.iter().map(|(_, part)| part.numel()).sum::<usize>();
        let overlap =
            parts.iter().enumerate().any(|(at, (_, a))| parts[..at].iter().any(|(_, b)| a.intersect(b).is_some()));
        if covered != region.numel() || overlap {
            let reason = format!("the chunks of {name} do not cover it, each element once");
            return Err(Error::Damaged { object: self.store.name(METADATA), reason });
        }
        for (chunk, _) in parts {
            self.copy_chunk(chunk, info, region, out).map_err(Error::of_tensor(name))?;
        }
        Ok(())
    }
}

/// Whether a tensor of these strides lies row-major.
fn contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(&length, &stride)| {
        let fits = length == 1 || stride == expected;
        expected *= length;
        fits
    })
}

/// The last index of a region that has elements.
fn last(region: &Region) -> Vec<usize> {
    region.ranges().map(|range| range.end - 1).collect()
}

/// The next index, row-major.
fn advance(index: &mut [usize], region: &Region) {
    for (axis, range) in region.ranges().enumerate().rev() {
        index[axis] += 1;
        if index[axis] < range.end {
            return;
        }
        index[axis] = range.start;
    }
}
