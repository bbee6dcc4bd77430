//! Loading tensors of any source into shards of any layout.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, PoisonError};
use std::thread;

use ferrotitan_comm::DeviceMesh;
use ferrotitan_ext::storage;
use ferrotitan_mesh::Region;
use tch::Tensor;

use crate::agree::agree;
use crate::boxes::pieces;
use crate::save::{Item, check, view};
use crate::{Dtype, Error, Result, Source};

/// The most bytes read at once into one buffer.
const PIECE: usize = 16 << 20;
/// Threads that read, each with a buffer.
const READERS: usize = 4;

/// What a load allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadOptions {
    /// Whether a tensor may have another dtype in the source than in the model. Its values are then converted.
    pub cast: bool,
    /// Whether every tensor of the source must be asked for, by any rank.
    pub exact: bool,
}

/// A shard to load, or a part of one.
struct Piece<'a> {
    name: &'a str,
    region: Region,
    /// What the source holds.
    dtype: Dtype,
    /// Where it belongs.
    target: Tensor,
    cast: bool,
}

/// Loads each item's shard from a source, wherever its values lie there, in place. All ranks of the mesh call it
/// together; each gives the items that it holds, and replicas each read for themselves. Items of other stages are left
/// alone. Gives the bytes that this rank has read.
///
/// Reads what the shards need, in pieces of bounded size, several at a time.
///
/// # Errors
/// On all ranks when any has one, before anything is read: [`Error::Lacking`], [`Error::Shape`], [`Error::Dtype`],
/// [`Error::Item`], and [`Error::Unasked`] where [`LoadOptions::exact`]. Then what the source says: some items have new
/// values by then, and others have not.
pub fn load(
    source: &dyn Source,
    items: impl IntoIterator<Item = Item>,
    mesh: &DeviceMesh,
    options: &LoadOptions,
) -> Result<u64> {
    let items: Vec<Item> = items.into_iter().filter(|item| item.layout.is_held(mesh)).collect();
    let asked: BTreeSet<&str> = items.iter().map(|item| item.name.as_str()).collect();
    let unasked = || source.tensors().keys().filter(|name| !asked.contains(name.as_str()));
    let (pieces, told) = match plan(source, &items, mesh, options) {
        Ok(pieces) if options.exact => (pieces, Ok(serde_json::json!(unasked().collect::<Vec<_>>()).to_string())),
        Ok(pieces) => (pieces, Ok(String::new())),
        Err(error) => (Vec::new(), Err(error)),
    };
    let told = agree(&mesh.world(), told)?;
    if options.exact {
        let lists = told.iter().map(|list| serde_json::from_str::<BTreeSet<String>>(list).unwrap_or_default());
        let names = lists.reduce(|a, b| a.intersection(&b).cloned().collect()).unwrap_or_default();
        if !names.is_empty() {
            return Err(Error::Unasked { names: names.into_iter().collect() });
        }
    }
    let (bytes, told) = match read_all(source, &pieces) {
        Ok(bytes) => (bytes, Ok(String::new())),
        Err(error) => (0, Err(error)),
    };
    agree(&mesh.world(), told)?;
    Ok(bytes)
}

/// What this rank has to read, once it is clear that it can be.
fn plan<'a>(
    source: &dyn Source,
    items: &'a [Item],
    mesh: &DeviceMesh,
    options: &LoadOptions,
) -> Result<Vec<Piece<'a>>> {
    let lacks = |item: &&Item| !source.tensors().contains_key(&item.name);
    let names: Vec<String> = items.iter().filter(lacks).map(|item| item.name.clone()).collect();
    if !names.is_empty() {
        return Err(Error::Lacking { names });
    }
    let mut planned = Vec::new();
    for item in items {
        let (needed, region) = check(item, mesh)?;
        let Some(found) = source.tensors().get(&item.name) else { continue };
        if found.shape != needed.shape {
            let (found, needed) = (found.shape.clone(), needed.shape);
            return Err(Error::Shape { tensor: item.name.clone(), found, needed });
        }
        let cast = found.dtype != needed.dtype;
        if cast && !options.cast {
            let (found, needed) = (found.dtype, needed.dtype);
            return Err(Error::Dtype { tensor: item.name.clone(), found, needed });
        }
        for piece in pieces(&region, found.dtype.size(), PIECE) {
            let target = view(&item.tensor, &region, &piece)?;
            planned.push(Piece { name: &item.name, region: piece, dtype: found.dtype, target, cast });
        }
    }
    Ok(planned)
}

/// Reads on a few threads, and puts the values where they belong on this one.
fn read_all(source: &dyn Source, pieces: &[Piece<'_>]) -> Result<u64> {
    let jobs: Vec<(&str, &Region, usize)> =
        pieces.iter().map(|piece| (piece.name, &piece.region, piece.region.numel() * piece.dtype.size())).collect();
    let (next, spare) = (AtomicUsize::new(0), Mutex::new(Vec::<Vec<u8>>::new()));
    let take_buffer = || spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
    let (tell, read) = sync_channel(1);
    thread::scope(|scope| {
        for _ in 0..READERS.min(jobs.len()) {
            let (tell, jobs, next, take_buffer) = (tell.clone(), &jobs, &next, &take_buffer);
            let reader = move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&(name, region, bytes)) = jobs.get(index) else { break };
                    let mut buffer = take_buffer();
                    buffer.resize(bytes, 0);
                    let done = source.read(name, region, &mut buffer).map(|()| (index, buffer));
                    let failed = done.is_err();
                    // Nobody listens after an error.
                    if tell.send(done).is_err() || failed {
                        break;
                    }
                }
            };
            let spawned = thread::Builder::new().name("load".to_owned()).spawn_scoped(scope, reader);
            spawned.map_err(|error| Error::Thread { thread: "loading", reason: error.to_string() })?;
        }
        drop(tell);
        let mut bytes = 0;
        for done in read {
            let (index, buffer): (usize, Vec<u8>) = done?;
            put(&pieces[index], &buffer)?;
            bytes += buffer.len() as u64;
            spare.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        }
        Ok(bytes)
    })
}

fn put(piece: &Piece<'_>, bytes: &[u8]) -> Result<()> {
    if !piece.cast {
        return Ok(storage::write(&piece.target, bytes)?);
    }
    let shape: Vec<i64> = piece.region.shape.iter().map(|&length| length as i64).collect();
    let found = storage::from_bytes(bytes, &shape, piece.dtype.kind())?;
    let converted = found.f_to_kind(piece.target.f_kind()?)?.f_to_device(piece.target.device())?;
    Ok(storage::overwrite(&piece.target, &converted)?)
}
