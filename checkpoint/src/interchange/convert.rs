//! Any source as a checkpoint of this crate.

use std::cmp::Reverse;

use ferrotitan_mesh::Region;
use serde_json::Value;

use crate::boxes::pieces;
use crate::checkpoint::folder;
use crate::manifest::{Entry, File, MANIFEST, Manifest, Part, Presence, presence, seal};
use crate::save::{Sums, dotted};
use crate::tensor_file::header;
use crate::{Error, Result, Source, Store, TensorInfo};

/// Bytes of tensors in one file; larger tensors are cut.
const FILE: usize = 512 << 20;
/// Bytes that are read at a time.
const READ: usize = 8 << 20;
/// The folder of the files in that of the step. Saves have names of 16 digits there.
const ATTEMPT: &str = "converted";

/// Saves every tensor of a source as step `step` of the checkpoints in `store`, with this `state` beside them, in memory of
/// a few pieces of a tensor. `progress` is told how many bytes of how many are written.
///
/// The step exists once this returns, and any mesh can load it.
///
/// # Errors
/// [`Error::StepExists`]; those of the source and the store.
pub fn convert(
    source: &dyn Source,
    store: &Store,
    step: u64,
    state: Value,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let exists = || Error::StepExists { step, address: store.to_string() };
    let into = store.below(&folder(step));
    if presence(&into)? == Presence::There {
        return Err(exists());
    }
    let mut manifest = Manifest::new(step, state);
    let (mut files, mut free, mut total) = (Vec::<Vec<(&String, Region)>>::new(), 0, 0);
    let mut tensors: Vec<_> = source.tensors().iter().collect();
    // Larger elements first, so that all are aligned in their files.
    tensors.sort_by_key(|(_, info)| Reverse(info.dtype.size()));
    for (name, TensorInfo { shape, dtype }) in tensors {
        manifest.tensors.insert(name.clone(), Entry { dtype: *dtype, shape: shape.clone(), parts: Vec::new() });
        for region in pieces(&Region::whole(shape), dtype.size(), FILE) {
            let bytes = region.numel() * dtype.size();
            if files.is_empty() || bytes > free {
                files.push(Vec::new());
                free = FILE;
            }
            free = free.saturating_sub(bytes);
            total += bytes as u64;
            if let Some(file) = files.last_mut() {
                file.push((name, region));
            }
        }
    }
    let mut done = 0;
    for (index, parts) in files.iter().enumerate() {
        let path = format!("{ATTEMPT}/{index:04}.safetensors");
        write_file(source, &into, path, parts, &mut manifest, &mut |more| {
            done += more;
            progress(done, total);
        })?;
    }
    if let Err((tensor, reason)) = manifest.check() {
        return Err(Error::Coverage { tensor: tensor.to_owned(), reason });
    }
    if into.put_if_absent(MANIFEST, seal(&manifest)?)? { Ok(()) } else { Err(exists()) }
}

fn write_file(
    source: &dyn Source,
    into: &Store,
    path: String,
    parts: &[(&String, Region)],
    manifest: &mut Manifest,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let infos: Vec<_> = parts
        .iter()
        .map(|(name, region)| {
            let TensorInfo { shape, dtype } = &source.tensors()[*name];
            let key = match region.shape == *shape {
                true => (*name).clone(),
                false => format!("{name}@{}", dotted(&region.offset)),
            };
            (key, TensorInfo { shape: region.shape.clone(), dtype: *dtype })
        })
        .collect();
    let header = header(&infos)?;
    let mut writer = into.writer(&path)?;
    writer.write(&header)?;
    let (mut end, mut buffer) = (header.len() as u64, Vec::new());
    for ((name, region), (_, info)) in parts.iter().zip(&infos) {
        let (start, mut sums) = (end, Sums::default());
        for piece in pieces(region, info.dtype.size(), READ) {
            buffer.resize(piece.numel() * info.dtype.size(), 0);
            source.read(name, &piece, &mut buffer)?;
            writer.write(&buffer)?;
            sums.add(&buffer);
            end += buffer.len() as u64;
            progress(buffer.len() as u64);
        }
        let Region { offset, shape } = region.clone();
        if let Some(entry) = manifest.tensors.get_mut(*name) {
            entry.parts.push(Part { file: path.clone(), bytes: (start, end), offset, shape, crc32c: sums.finish() });
        }
    }
    writer.finish()?;
    let (header_bytes, header_crc32c) = (header.len() as u64, crc32c::crc32c(&header));
    manifest.files.insert(path, File { bytes: end, header_bytes, header_crc32c });
    Ok(())
}
