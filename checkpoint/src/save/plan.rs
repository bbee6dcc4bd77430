//! What one rank writes of a step, and in which files.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use ferrotitan_comm::DeviceMesh;
use ferrotitan_mesh::{Mesh as _, Region, View};
use tch::Tensor;

use super::Item;
use crate::boxes::pieces;
use crate::{Dtype, Error, Result, TensorInfo};

/// What a rank writes.
#[derive(Debug)]
pub(super) struct Plan {
    /// All tensors that this rank holds something of, also those that others write.
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// What it owns.
    pub(super) shards: Vec<Shard>,
    pub(super) files: Vec<Vec<Piece>>,
    pub(super) bytes: u64,
}

/// A tensor's shard that this rank owns.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    /// The global shape.
    pub(super) shape: Vec<usize>,
    pub(super) region: Region,
    pub(super) tensor: Tensor,
}

/// A box of a shard that goes into one file as one tensor.
#[derive(Debug)]
pub(super) struct Piece {
    /// Which shard.
    pub(super) shard: usize,
    pub(super) region: Region,
    pub(super) bytes: usize,
}

impl Plan {
    pub(super) fn new(items: impl IntoIterator<Item = Item>, mesh: &DeviceMesh, file_bytes: usize) -> Result<Self> {
        let (mut tensors, mut shards) = (BTreeMap::new(), Vec::new());
        for item in items {
            let (info, region) = check(&item, mesh)?;
            if tensors.insert(item.name.clone(), info.clone()).is_some() {
                return Err(bad(&item.name, "it is given twice; names must differ".to_owned()));
            }
            if item.layout.is_owner(mesh) {
                let TensorInfo { shape, dtype } = info;
                shards.push(Shard { name: item.name, dtype, shape, region, tensor: item.tensor });
            }
        }
        // Larger elements first, so that all are aligned in their files.
        shards.sort_by_key(|shard| Reverse(shard.dtype.size()));
        let mut plan = Plan { tensors, shards, files: Vec::new(), bytes: 0 };
        plan.fill_files(file_bytes);
        Ok(plan)
    }

    fn fill_files(&mut self, file_bytes: usize) {
        let mut free = 0;
        for (index, shard) in self.shards.iter().enumerate() {
            let element = shard.dtype.size();
            for region in pieces(&shard.region, element, file_bytes) {
                let bytes = region.numel() * element;
                if self.files.is_empty() || bytes > free {
                    self.files.push(Vec::new());
                    free = file_bytes;
                }
                free = free.saturating_sub(bytes);
                self.bytes += bytes as u64;
                if let Some(file) = self.files.last_mut() {
                    file.push(Piece { shard: index, region, bytes });
                }
            }
        }
    }
}

/// Refuses an item that cannot be; else says what it is, and which box of it this rank holds.
pub(crate) fn check(item: &Item, mesh: &DeviceMesh) -> Result<(TensorInfo, Region)> {
    let Item { name, layout, tensor } = item;
    layout.check(&mesh.degrees()).map_err(|error| bad(name, error.to_string()))?;
    if layout.partial() != View::NONE {
        return Err(bad(name, format!("it is a sum still to be taken over {}; reduce it first", layout.partial())));
    }
    let info = TensorInfo { shape: layout.shape().to_vec(), dtype: Dtype::of(tensor.f_kind()?)? };
    if info.bytes().is_none() {
        return Err(bad(name, format!("the shape {:?} is too large", info.shape)));
    }
    let region = layout.local_region(mesh);
    let found = tensor.size();
    if !found.iter().map(|&length| length as usize).eq(region.shape.iter().copied()) {
        let reason = format!("this rank's shard has shape {found:?}, but its layout says {:?}", region.shape);
        return Err(bad(name, reason));
    }
    Ok((info, region))
}

fn bad(tensor: &str, reason: String) -> Error {
    Error::Item { tensor: tensor.to_owned(), reason }
}
