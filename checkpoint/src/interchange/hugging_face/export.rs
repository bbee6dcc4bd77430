//! Writing a Llama.

use std::collections::BTreeMap;

use bytes::Bytes;
use ferrotitan_mesh::Region;
use serde_json::{Value, json};

use super::names::{Entry, Rotary};
use super::{CONFIG, Config, GENERATION, INDEX, SINGLE, is_float};
use crate::interchange::cast::cast;
use crate::interchange::flaw::Flaw;
use crate::tensor_file::header;
use crate::{Dtype, Error, Result, Source, Store, TensorInfo};

/// Bytes of a tensor that are read at a time.
const ROWS: usize = 8 << 20;

/// How a Llama is written.
#[derive(Debug, Clone)]
pub struct Options {
    /// The shape of the model.
    pub config: Config,
    /// The type of its elements, a floating point one of 16 bits or more; that which each tensor has where `None`.
    pub dtype: Option<Dtype>,
    /// The most bytes of tensors in one file, or one tensor.
    pub max_shard_bytes: u64,
}

impl Options {
    /// A model as it is, in files of 5 GB.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Options { config, dtype: None, max_shard_bytes: 5_000_000_000 }
    }
}

/// A Llama about to be written: which files there will be, and what is in them.
///
/// It is the same on every rank that has the same source and options, so that each may write some of the
/// [files](Export::write_file): then, once all are there, one [finishes](Export::finish).
#[derive(Debug)]
pub struct Export<'a> {
    source: &'a dyn Source,
    config: Config,
    files: Vec<File>,
}

#[derive(Debug)]
struct File {
    name: String,
    tensors: Vec<(Entry, Dtype)>,
}

/// Writes a Llama from any source that has its tensors under Ferrotitan's names, all at once. `progress` is told how many
/// bytes of how many are written.
///
/// Others of its tensors, such as an optimizer's, are left out.
///
/// # Errors
/// As [`Export::new`], [`Export::write_file`] and [`Export::finish`].
pub fn write(source: &dyn Source, store: &Store, options: &Options, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
    let export = Export::new(source, options)?;
    export.refuse_strangers(store)?;
    let total = (0..export.files()).map(|file| export.bytes(file)).sum();
    let mut done = 0;
    for file in 0..export.files() {
        export.write_file(store, file, &mut |more| {
            done += more;
            progress(done, total);
        })?;
    }
    export.finish(store)
}

impl<'a> Export<'a> {
    /// Plans the files.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when no model has the shape, or Hugging Face's Llama not the dtype; [`Error::Lacking`] and
    /// [`Error::Shape`] when the source is not that model.
    pub fn new(source: &'a dyn Source, options: &Options) -> Result<Self> {
        let Options { config, dtype, max_shard_bytes } = options.clone();
        config.check().map_err(Flaw::of("the shape of the model"))?;
        let (mut files, mut free, mut lacking) = (Vec::<File>::new(), 0, Vec::new());
        for entry in config.entries() {
            let Some(info) = source.tensors().get(&entry.ours) else {
                lacking.push(entry.ours);
                continue;
            };
            if info.shape != entry.shape {
                return Err(Error::Shape { tensor: entry.ours, found: info.shape.clone(), needed: entry.shape });
            }
            let dtype = dtype.unwrap_or(info.dtype);
            if !is_float(dtype) || !is_float(info.dtype) {
                let what = format!("{} from {} to {dtype}", entry.ours, info.dtype);
                return Err(Error::Unsupported { what, reason: "weights are F64, F32, BF16 or F16".to_owned() });
            }
            let bytes = TensorInfo { shape: entry.shape.clone(), dtype }.bytes();
            let bytes =
                bytes.ok_or_else(|| Error::Item { tensor: entry.ours.clone(), reason: "it is too large".into() });
            let bytes = bytes? as u64;
            if files.is_empty() || bytes > free {
                files.push(File { name: String::new(), tensors: Vec::new() });
                free = max_shard_bytes;
            }
            free = free.saturating_sub(bytes);
            if let Some(file) = files.last_mut() {
                file.tensors.push((entry, dtype));
            }
        }
        if !lacking.is_empty() {
            return Err(Error::Lacking { names: lacking });
        }
        let count = files.len();
        for (index, file) in files.iter_mut().enumerate() {
            file.name = match count {
                1 => SINGLE.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
        }
        Ok(Export { source, config, files })
    }

    /// How many files hold the tensors.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// The bytes of tensors in a file.
    pub fn bytes(&self, file: usize) -> u64 {
        self.files[file].tensors.iter().map(|(entry, dtype)| entry.bytes(*dtype)).sum()
    }

    /// Writes one of the files, a part of a tensor at a time. `progress` is told of each more bytes.
    ///
    /// # Errors
    /// The source's and the store's.
    ///
    /// # Panics
    /// When there are fewer files.
    pub fn write_file(&self, store: &Store, file: usize, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let File { name, tensors } = &self.files[file];
        let infos: Vec<_> = tensors
            .iter()
            .map(|(entry, dtype)| (entry.theirs.clone(), TensorInfo { shape: entry.shape.clone(), dtype: *dtype }))
            .collect();
        let mut writer = store.writer(name)?;
        writer.write(&header(&infos)?)?;
        let (mut ours, mut ordered, mut converted) = (Vec::new(), Vec::new(), Vec::new());
        for (entry, dtype) in tensors {
            let info = &self.source.tensors()[&entry.ours];
            let row = entry.shape[1..].iter().product::<usize>() * info.dtype.size();
            // Rows are put into order within a head, so whole heads are read.
            let unit = entry.rotary.map_or(1, |rotary| rotary.head_dim);
            let rows = (ROWS / (row * unit)).max(1) * unit;
            for first in (0..entry.shape[0]).step_by(rows) {
                let mut part = Region::whole(&entry.shape);
                (part.offset[0], part.shape[0]) = (first, rows.min(entry.shape[0] - first));
                ours.resize(part.shape[0] * row, 0);
                self.source.read(&entry.ours, &part, &mut ours)?;
                let bytes = match entry.rotary {
                    Some(rotary) => reorder(rotary, row, &ours, &mut ordered),
                    None => &ours[..],
                };
                let bytes = cast(bytes, info.dtype, *dtype, &mut converted)?;
                writer.write(bytes)?;
                progress(bytes.len() as u64);
            }
        }
        writer.finish()
    }

    /// Writes the index and the configuration, which make the model complete. All files must be there.
    ///
    /// # Errors
    /// [`Error::NotFound`] when one is not; [`Error::Unsupported`] when the folder holds other files of tensors, which
    /// readers would take for part of the model; the store's.
    pub fn finish(&self, store: &Store) -> Result<()> {
        self.refuse_strangers(store)?;
        for file in &self.files {
            store.size(&file.name)?;
        }
        let tensors = || self.files.iter().flat_map(|file| file.tensors.iter().map(move |tensor| (&file.name, tensor)));
        if self.files.len() > 1 {
            let map: BTreeMap<_, _> = tensors().map(|(file, (entry, _))| (&entry.theirs, file)).collect();
            let bytes: u64 = (0..self.files()).map(|file| self.bytes(file)).sum();
            put(store, INDEX, &json!({ "metadata": { "total_size": bytes }, "weight_map": map }))?;
        }
        // Some readers load all tensors in the dtype that is given here: the widest.
        let dtype = tensors().map(|(_, (_, dtype))| *dtype).max_by_key(|dtype| dtype.size());
        put(
            store,
            GENERATION,
            &json!({ "bos_token_id": self.config.bos_token, "eos_token_id": self.config.eos_json() }),
        )?;
        put(store, CONFIG, &self.config.to_json(torch_name(dtype.unwrap_or(Dtype::F32))))
    }

    /// Refuses a folder that holds files of tensors that are not those of this model, as [`finish`](Self::finish) would once
    /// all is written.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; the store's.
    pub fn refuse_strangers(&self, store: &Store) -> Result<()> {
        let stranger = |path: &&(String, u64)| {
            let ours = self.files.iter().any(|file| file.name == path.0) || (self.files.len() > 1 && path.0 == INDEX);
            !ours && (path.0.ends_with(".safetensors") || path.0 == INDEX)
        };
        match store.list("")?.iter().find(stranger) {
            Some((path, _)) => Err(Error::Unsupported {
                what: format!("a model beside {}", store.name(path)),
                reason: "readers would take it for part of the model; write to another folder, or delete it".to_owned(),
            }),
            None => Ok(()),
        }
    }
}

impl Entry {
    fn bytes(&self, dtype: Dtype) -> u64 {
        // Small enough: the plan was made of them.
        TensorInfo { shape: self.shape.clone(), dtype }.bytes().unwrap_or(0) as u64
    }
}

/// Whole heads of ours in their order of rows.
fn reorder<'a>(rotary: Rotary, row: usize, ours: &[u8], theirs: &'a mut Vec<u8>) -> &'a [u8] {
    theirs.clear();
    for at in 0..ours.len() / row {
        theirs.extend_from_slice(&ours[rotary.ours(at) * row..][..row]);
    }
    theirs
}

fn put(store: &Store, path: &str, json: &Value) -> Result<()> {
    store.put(path, Bytes::from(format!("{json:#}\n")))
}

/// PyTorch's name of a dtype that a model can have.
fn torch_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F64 => "float64",
        Dtype::Bf16 => "bfloat16",
        Dtype::F16 => "float16",
        _ => "float32",
    }
}
