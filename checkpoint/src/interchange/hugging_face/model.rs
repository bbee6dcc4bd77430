//! Reading a Llama.

use std::collections::{BTreeMap, BTreeSet};

use ferrotitan_mesh::Region;
use serde::Deserialize;

use super::Config;
use super::names::Rotary;
use super::{CONFIG, INDEX, SINGLE, is_float};
use crate::interchange::flaw::Flaw;
use crate::interchange::gather::Stored;
use crate::interchange::safetensors_file::{self, Entry};
use crate::{Error, Result, Source, Store, TensorInfo};

const CONFIG_LIMIT: u64 = 1 << 20;
const INDEX_LIMIT: u64 = 64 << 20;
/// Bytes of rows that are put into order at a time.
const ROWS: usize = 8 << 20;

/// A Llama in Hugging Face's format, read where it lies, under Ferrotitan's names and in its order of rows.
///
/// Of a model with tied embeddings there is no `output.weight`.
#[derive(Debug)]
pub struct Model {
    store: Store,
    config: Config,
    infos: BTreeMap<String, TensorInfo>,
    places: BTreeMap<String, Place>,
}

/// Where a tensor is.
#[derive(Debug)]
struct Place {
    file: String,
    start: u64,
    rotary: Option<Rotary>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Model {
    /// Reads `config.json`, the index and the headers of the files in this folder, and checks that together they are a
    /// Llama.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Damaged`]; [`Error::Unsupported`] when it is another model, a quantized one, or one
    /// with something that Ferrotitan's Llama lacks; [`Error::Lacking`] and [`Error::Unasked`] when its tensors are not
    /// those of its configuration.
    pub fn open(store: Store) -> Result<Self> {
        let config = Config::parse(&store.get(CONFIG, CONFIG_LIMIT)?).map_err(Flaw::of(&store.name(CONFIG)))?;
        let mut found = tensors(&store)?;
        let (mut infos, mut places) = (BTreeMap::new(), BTreeMap::new());
        for entry in config.entries() {
            let Some((file, Entry { info, start })) = found.remove(&entry.theirs) else {
                return Err(Error::Lacking { names: vec![entry.theirs] });
            };
            if info.shape != entry.shape {
                return Err(Error::Shape { tensor: entry.theirs, found: info.shape, needed: entry.shape });
            }
            if !is_float(info.dtype) {
                let what = format!("{} as {}", entry.theirs, info.dtype);
                let reason = "quantized weights cannot be read; convert the model to BF16 first".to_owned();
                return Err(Error::Unsupported { what, reason });
            }
            infos.insert(entry.ours.clone(), info);
            places.insert(entry.ours, Place { file, start, rotary: entry.rotary });
        }
        // Old files hold the frequencies of the rotary embedding, and some a second copy of a tied table.
        found.retain(|name, _| {
            let copy = config.tied_embeddings && name == "lm_head.weight";
            !copy && !name.ends_with(".rotary_emb.inv_freq")
        });
        if !found.is_empty() {
            return Err(Error::Unasked { names: found.into_keys().collect() });
        }
        Ok(Model { store, config, infos, places })
    }

    /// The shape of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The file that holds a tensor; `None` when there is no such tensor.
    pub fn file(&self, name: &str) -> Option<&str> {
        self.places.get(name).map(|place| place.file.as_str())
    }
}

impl Source for Model {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.infos
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.check(name, region, out)?;
        let Some(place) = self.places.get(name) else { return Ok(()) };
        let size = info.dtype.size();
        let whole = Region::whole(&info.shape);
        let stored = Stored { store: &self.store, path: &place.file, start: place.start, region: &whole, size };
        let Some(rotary) = place.rotary else {
            return stored.copy_to(region, out).map_err(Error::of_tensor(name));
        };
        let row = region.shape[1] * size;
        if out.is_empty() {
            return Ok(());
        }
        let first = region.offset[0];
        let mut theirs = Vec::new();
        for run in rotary.runs(first..first + region.shape[0], ROWS / row) {
            let mut part = region.clone();
            (part.offset[0], part.shape[0]) = (run.start, run.len());
            theirs.resize(run.len() * row, 0);
            stored.copy_to(&part, &mut theirs).map_err(Error::of_tensor(name))?;
            for (at, bytes) in run.zip(theirs.chunks_exact(row)) {
                out[(rotary.ours(at) - first) * row..][..row].copy_from_slice(bytes);
            }
        }
        Ok(())
    }
}

/// All tensors of all files, by Hugging Face's names.
fn tensors(store: &Store) -> Result<BTreeMap<String, (String, Entry)>> {
    let of = |file: &str| -> Result<Vec<_>> {
        let entries = safetensors_file::entries(store, file)?;
        Ok(entries.into_iter().map(|(name, entry)| (name, (file.to_owned(), entry))).collect())
    };
    // Where there are both, `transformers` takes this one.
    if store.exists(SINGLE)? {
        return Ok(of(SINGLE)?.into_iter().collect());
    }
    let index = match store.get(INDEX, INDEX_LIMIT) {
        Err(Error::NotFound { .. }) => {
            return Err(Error::NotFound { object: format!("{} or {INDEX} beside it", store.name(SINGLE)) });
        }
        other => other?,
    };
    let damaged = |reason: String| Error::Damaged { object: store.name(INDEX), reason };
    let Index { weight_map } = serde_json::from_slice(&index).map_err(|error| damaged(error.to_string()))?;
    let files: BTreeSet<_> = weight_map.values().collect();
    let mut tensors = BTreeMap::new();
    for file in files {
        // A path that leads out of the folder would read what nobody asked to be read.
        if file.contains(['/', '\\', '\0', ':']) || matches!(file.as_str(), "" | "." | "..") {
            return Err(damaged(format!("{file:?} is no file of this folder")));
        }
        for (name, place) in of(file)? {
            if weight_map.get(&name) != Some(file) {
                return Err(damaged(format!("it does not say that {name} is in {file}")));
            }
            tensors.insert(name, place);
        }
    }
    if let Some((name, file)) = weight_map.iter().find(|(name, _)| !tensors.contains_key(*name)) {
        return Err(damaged(format!("it says that {name} is in {file}, which has no such tensor")));
    }
    Ok(tensors)
}
