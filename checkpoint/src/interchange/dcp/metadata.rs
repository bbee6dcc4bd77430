//! What `.metadata` says: which tensors there are, in which chunks, and where in which file each chunk lies.

use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;

use ferrotitan_mesh::Region;

use super::archive::Place;
use super::pickle::{Node, Pickle};
use crate::interchange::flaw::Flaw;
use crate::{Dtype, TensorInfo};

/// A tensor of the folder.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) info: TensorInfo,
    pub(super) chunks: Vec<Chunk>,
}

/// A box of a tensor, and what holds it.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    pub(super) region: Region,
    pub(super) item: Item,
    /// Where its elements are in the file, once somebody has looked.
    pub(super) place: OnceLock<Place>,
}

/// The bytes of a file that are what `torch.save` wrote for one chunk.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub(super) path: String,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// All that `.metadata` says.
#[derive(Debug, Default)]
pub(super) struct Metadata {
    pub(super) tensors: BTreeMap<String, Tensor>,
    /// The entries that are no tensors, such as numbers.
    pub(super) others: Vec<String>,
}

/// A chunk by its tensor's name and its offset in it.
type Key<'a> = (&'a str, Vec<usize>);

impl Metadata {
    pub(super) fn parse(bytes: &[u8]) -> Result<Metadata, Flaw> {
        let pickle = Pickle::parse(bytes)?;
        let root = pickle.root();
        let items = items(root.need("Metadata", "storage_data")?)?;
        let mut metadata = Metadata::default();
        for (name, entry) in root.need("Metadata", "state_dict_metadata")?.entries()? {
            let name = name.str()?;
            if entry.class()? == "BytesStorageMetadata" {
                metadata.others.push(name.to_owned());
                continue;
            }
            let tensor = tensor(name, entry, &items).map_err(|flaw| match flaw {
                Flaw::Damaged(reason) => Flaw::Damaged(format!("of {name}: {reason}")),
                other => other,
            })?;
            metadata.tensors.insert(name.to_owned(), tensor);
        }
        Ok(metadata)
    }
}

fn items(storage: Node<'_>) -> Result<HashMap<Key<'_>, Item>, Flaw> {
    let mut items = HashMap::new();
    for (index, place) in storage.entries()? {
        // What is no tensor has no offset.
        let offset = match index.field("MetadataIndex", "offset")? {
            Some(offset) if !offset.is_none() => size(offset)?,
            _ => continue,
        };
        let name = index.need("MetadataIndex", "fqn")?.str()?;
        if place.field("_StorageInfo", "transform_descriptors")?.is_some_and(|transforms| !transforms.is_none()) {
            return Flaw::unsupported(
                format!("a transformed (say, compressed) tensor, {name},"),
                "save it without transforms, or let PyTorch convert it",
            );
        }
        let path = place.need("_StorageInfo", "relative_path")?.str()?;
        // A path that leads out of the folder would read what nobody asked to be read.
        let inside = path.split('/').all(|part| !matches!(part, "" | "." | "..")) && !path.contains(['\\', '\0', ':']);
        if !inside {
            return Flaw::damaged(format!("{name} is said to lie in {path:?}, which is no file of this folder"));
        }
        let [start, length] = ["offset", "length"].map(|field| place.need("_StorageInfo", field).and_then(Node::size));
        let item = Item { path: path.to_owned(), offset: start? as u64, length: length? as u64 };
        items.insert((name, offset), item);
    }
    Ok(items)
}

fn tensor(name: &str, entry: Node<'_>, items: &HashMap<Key<'_>, Item>) -> Result<Tensor, Flaw> {
    const CLASS: &str = "TensorStorageMetadata";
    let shape = size(entry.need(CLASS, "size")?)?;
    let [dtype, layout] = entry.need(CLASS, "properties")?.state("TensorProperties")?.first()?;
    let info = TensorInfo { shape, dtype: self::dtype(dtype.global()?)? };
    let [layout] = layout.call("_get_layout")?.first()?;
    if layout.str()? != "torch.strided" {
        return Flaw::unsupported(format!("the layout {} of {name}", layout.str()?), "only dense tensors can be read");
    }
    if info.bytes().is_none() {
        return Flaw::damaged(format!("the shape {:?} is larger than memory", info.shape));
    }
    let whole = Region::whole(&info.shape);
    let mut chunks = Vec::new();
    for chunk in entry.need(CLASS, "chunks")?.items()? {
        let field = |name| chunk.need("ChunkStorageMetadata", name).and_then(size);
        let region = Region { offset: field("offsets")?, shape: field("sizes")? };
        if region.offset.len() != region.shape.len() || !whole.contains(&region) {
            return Flaw::damaged(format!("the chunk {region:?} is no part of the shape {:?}", info.shape));
        }
        if region.numel() == 0 {
            continue;
        }
        let Some(item) = items.get(&(name, region.offset.clone())) else {
            return Flaw::damaged(format!("no file is named for the chunk at {:?}", region.offset));
        };
        chunks.push(Chunk { region, item: item.clone(), place: OnceLock::new() });
    }
    Ok(Tensor { info, chunks })
}

/// A `torch.Size`, which is called with a tuple.
fn size(node: Node<'_>) -> Result<Vec<usize>, Flaw> {
    let [sizes] = node.call("Size")?.first()?;
    sizes.items()?.map(Node::size).collect()
}

/// The dtype of a name in the module `torch`, its own or that of a storage class.
pub(super) fn dtype(name: &str) -> Result<Dtype, Flaw> {
    Ok(match name {
        "bool" | "BoolStorage" => Dtype::Bool,
        "uint8" | "ByteStorage" => Dtype::U8,
        "int8" | "CharStorage" => Dtype::I8,
        "int16" | "ShortStorage" => Dtype::I16,
        "int32" | "IntStorage" => Dtype::I32,
        "int64" | "LongStorage" => Dtype::I64,
        "float16" | "HalfStorage" => Dtype::F16,
        "bfloat16" | "BFloat16Storage" => Dtype::Bf16,
        "float32" | "FloatStorage" => Dtype::F32,
        "float64" | "DoubleStorage" => Dtype::F64,
        "float8_e4m3fn" => Dtype::F8E4M3,
        "float8_e5m2" => Dtype::F8E5M2,
        "float8_e4m3fnuz" => Dtype::F8E4M3Fnuz,
        "float8_e5m2fnuz" => Dtype::F8E5M2Fnuz,
        "complex64" | "ComplexFloatStorage" => Dtype::C64,
        other => return Flaw::damaged(format!("there is {other} where a dtype should be")),
    })
}
