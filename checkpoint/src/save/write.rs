//! One rank's part of a save.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytes::Bytes;
use ferrotitan_ext::storage;
use ferrotitan_mesh::Region;
use serde_json::Value;
use tch::Tensor;

use super::plan::{Piece, Plan, Shard};
use super::{SaveOptions, Stats, commit, purge};
use crate::boxes::pieces;
use crate::checkpoint::folder;
use crate::manifest::{CHUNK, Entry, File, Manifest, Part, seal};
use crate::tensor_file::header;
use crate::{Error, Result, Store, TensorInfo};

/// A save as one rank does it, away from the thread that wanted it. No collective is used here.
#[derive(Debug)]
pub(super) struct Job {
    /// The folder of all steps.
    pub(super) store: Store,
    pub(super) step: u64,
    /// The folder of this attempt, in that of the step.
    pub(super) attempt: String,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) options: SaveOptions,
    pub(super) state: Value,
    pub(super) given_up: Arc<AtomicBool>,
}

impl Job {
    /// Writes this rank's files and says so; on rank 0, makes the step exist once all have said so.
    pub(super) fn run(&self, plan: Plan, mut stats: Stats) -> Result<Stats> {
        let begun = Instant::now();
        if self.rank == 0 {
            purge::remove_torn(&self.store, self.step, &self.attempt);
        }
        let mine = self.write(plan)?;
        if self.rank != 0 {
            self.step_store().put(&self.path(&index_name(self.rank)), seal(&mine)?)?;
        }
        stats.write = begun.elapsed();
        if self.rank == 0 {
            commit::commit(self, mine)?;
            stats.commit = begun.elapsed() - stats.write;
        }
        let Stats { step, bytes, files, write, .. } = stats;
        tracing::debug!(step, bytes, files, seconds = write.as_secs_f64(), "wrote this rank's part of a checkpoint");
        Ok(stats)
    }

    /// Tells rank 0 that this rank has failed, so that it does not wait. If that fails too, its patience will end.
    pub(super) fn leave_note(&self, error: &Error) {
        let path = self.path(&note_name(self.rank));
        if self.rank != 0
            && let Err(failed) = self.step_store().put(&path, Bytes::from(error.to_string()))
        {
            tracing::warn!(%failed, "cannot tell rank 0 of a failure");
        }
    }

    /// The folder of the step.
    pub(super) fn step_store(&self) -> Store {
        self.store.below(&folder(self.step))
    }

    /// A path in the folder of the step, of something of this attempt.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.attempt)
    }

    pub(super) fn check_given_up(&self) -> Result<()> {
        if self.given_up.load(Ordering::Relaxed) { Err(Error::GivenUp) } else { Ok(()) }
    }

    fn write(&self, plan: Plan) -> Result<Manifest> {
        let mut mine = Manifest::new(self.step, Value::Null);
        for (index, file) in plan.files.iter().enumerate() {
            let path = self.path(&format!("rank-{:05}-{index:04}.safetensors", self.rank));
            let (parts, written) = self.write_file(&path, file, &plan.shards)?;
            for (piece, part) in file.iter().zip(parts) {
                let Shard { name, dtype, shape, .. } = &plan.shards[piece.shard];
                let new = || Entry { dtype: *dtype, shape: shape.clone(), parts: Vec::new() };
                mine.tensors.entry(name.clone()).or_insert_with(new).parts.push(part);
            }
            mine.files.insert(path, written);
        }
        for (name, TensorInfo { shape, dtype }) in plan.tensors {
            mine.tensors.entry(name).or_insert(Entry { dtype, shape, parts: Vec::new() });
        }
        Ok(mine)
    }

    /// Writes one file; gives where its pieces are in it.
    fn write_file(&self, path: &str, file: &[Piece], shards: &[Shard]) -> Result<(Vec<Part>, File)> {
        let entries: Vec<_> = file
            .iter()
            .map(|Piece { shard, region, .. }| {
                let Shard { name, dtype, shape, .. } = &shards[*shard];
                let key =
                    if region.shape == *shape { name.clone() } else { format!("{name}@{}", dotted(&region.offset)) };
                (key, TensorInfo { shape: region.shape.clone(), dtype: *dtype })
            })
            .collect();
        let store = self.step_store();
        let mut writer = store.writer(path)?;
        let header = header(&entries)?;
        writer.write(&header)?;
        let mut end = header.len() as u64;
        let mut parts = Vec::with_capacity(file.len());
        for Piece { shard, region, bytes } in file {
            let Shard { dtype, region: whole, tensor, .. } = &shards[*shard];
            let mut sums = Sums::default();
            // Small enough to be still in the cache for the checksum, and no large copy of what is not contiguous.
            for piece in pieces(region, dtype.size(), CHUNK as usize) {
                self.check_given_up()?;
                let flat = view(tensor, whole, &piece)?.f_reshape([-1])?;
                let mut next = 0;
                writer.write_with(piece.numel() * dtype.size(), |out| {
                    let count = (out.len() / dtype.size()) as i64;
                    storage::read(&flat.f_narrow(0, next, count)?, out)?;
                    next += count;
                    sums.add(out);
                    Ok(())
                })?;
            }
            let start = end;
            end += *bytes as u64;
            let Region { offset, shape } = region.clone();
            parts.push(Part { file: path.to_owned(), bytes: (start, end), offset, shape, crc32c: sums.finish() });
        }
        writer.finish()?;
        let (header_bytes, header_crc32c) = (header.len() as u64, crc32c::crc32c(&header));
        Ok((parts, File { bytes: end, header_bytes, header_crc32c }))
    }
}

pub(super) fn index_name(rank: usize) -> String {
    format!("rank-{rank:05}.json")
}

pub(super) fn note_name(rank: usize) -> String {
    format!("rank-{rank:05}.failed")
}

/// The box of a shard as a view of it.
pub(crate) fn view(tensor: &Tensor, whole: &Region, region: &Region) -> Result<Tensor> {
    let mut view = tensor.f_detach()?;
    for axis in 0..region.shape.len() {
        if region.shape[axis] != whole.shape[axis] {
            let start = region.offset[axis] - whole.offset[axis];
            view = view.f_narrow(axis as i64, start as i64, region.shape[axis] as i64)?;
        }
    }
    Ok(view)
}

/// `0,1024`.
pub(crate) fn dotted(offset: &[usize]) -> String {
    offset.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The checksums of a part that comes in slices.
#[derive(Default)]
pub(crate) struct Sums {
    done: Vec<u32>,
    current: u32,
    filled: usize,
}

impl Sums {
    pub(crate) fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK as usize - self.filled));
            self.current = crc32c::crc32c_append(self.current, now);
            self.filled += now.len();
            bytes = later;
            if self.filled == CHUNK as usize {
                self.done.push(self.current);
                (self.current, self.filled) = (0, 0);
            }
        }
    }

    pub(crate) fn finish(mut self) -> Vec<u32> {
        if self.filled > 0 {
            self.done.push(self.current);
        }
        self.done
    }
}
