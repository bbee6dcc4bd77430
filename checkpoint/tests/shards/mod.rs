//! Global tensors of any layout, as items of ranks, for tests.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use ferrotitan_checkpoint::mesh::{Layout, Mesh, Region};
use ferrotitan_checkpoint::{Dtype, Item, Result, Source};
use ferrotitan_ext::storage;

/// A global tensor, as its bytes.
#[derive(Clone, Debug)]
pub struct Global {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Global {
    /// A tensor whose every byte depends on `seed`.
    pub fn new(name: &str, dtype: Dtype, shape: &[usize], seed: u64) -> Self {
        let length = shape.iter().product::<usize>() * dtype.size();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        // A prime number of random bytes, over and over.
        let mut random = || if dtype == Dtype::Bool { next() & 1 } else { next() };
        let block: Vec<u8> = (0..length.min(65_521)).map(|_| random()).collect();
        let bytes = block.iter().copied().cycle().take(length).collect();
        Global { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
    }

    /// What a region of it holds.
    pub fn part(&self, region: &Region) -> Vec<u8> {
        let size = self.dtype.size();
        let runs = region.runs_in(&Region::whole(&self.shape));
        runs.flat_map(|(start, length)| self.bytes[start * size..(start + length) * size].to_vec()).collect()
    }

    /// The shard of a rank.
    pub fn item(&self, layout: &Layout, mesh: &dyn Mesh) -> Item {
        self.item_of(layout, mesh, |bytes| bytes)
    }

    /// A shard of the same kind, to load into, whose every byte is other than it should be.
    pub fn blank(&self, layout: &Layout, mesh: &dyn Mesh) -> Item {
        let flip = if self.dtype == Dtype::Bool { 1 } else { 0xff };
        self.item_of(layout, mesh, |bytes| bytes.into_iter().map(|byte| byte ^ flip).collect())
    }

    fn item_of(&self, layout: &Layout, mesh: &dyn Mesh, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Item {
        let region = layout.local_region(mesh);
        let shape: Vec<i64> = region.shape.iter().map(|&length| length as i64).collect();
        let tensor = storage::from_bytes(&change(self.part(&region)), &shape, self.dtype.kind()).unwrap();
        Item::new(&self.name, layout.clone(), tensor)
    }

    /// Whether a shard is what it should be, to the bit.
    pub fn matches(&self, item: &Item, mesh: &dyn Mesh) -> bool {
        storage::to_bytes(&item.tensor).unwrap() == self.part(&item.layout.local_region(mesh))
    }

    /// Whether a source holds it, to the bit.
    pub fn is_in(&self, source: &dyn Source) -> Result<bool> {
        let mut bytes = vec![0; self.bytes.len()];
        source.read(&self.name, &Region::whole(&self.shape), &mut bytes)?;
        Ok(bytes == self.bytes)
    }
}
