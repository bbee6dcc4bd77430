//! Random tensors, dense reference reads, and where Python is.

use std::path::{Path, PathBuf};

use ferrotitan_checkpoint::Source;
use ferrotitan_checkpoint::interchange::Memory;
use ferrotitan_checkpoint::interchange::hugging_face::{Config, RopeScaling};
use ferrotitan_checkpoint::mesh::Region;
use ferrotitan_checkpoint::tch::{Kind, Tensor};
use proptest::prelude::*;

/// The Python that has torch: named by the environment, or the one whose libtorch this was built with.
pub(crate) fn python() -> Option<PathBuf> {
    let named = std::env::var_os("FERROTITAN_PYTHON").map(PathBuf::from);
    let beside = std::env::var_os("LIBTORCH")
        .and_then(|torch| Path::new(&torch).ancestors().nth(4).map(|environment| environment.join("bin/python")));
    named.or(beside).filter(|python| python.is_file())
}

/// A path in this folder.
pub(crate) fn beside(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interchange").join(file)
}

pub(crate) fn config() -> Config {
    Config {
        dim: 32,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        hidden_dim: 48,
        vocab_size: 61,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        // A short original context, so that all three bands of wavelengths occur.
        rope_scaling: Some(RopeScaling {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 64.0,
        }),
        max_seq_len: 128,
        tied_embeddings: false,
        bos_token: Some(1),
        eos_tokens: vec![2, 3],
    }
}

/// The names and shapes of a model's tensors, written down once more.
pub(crate) fn shapes(config: &Config) -> Vec<(String, Vec<usize>)> {
    let Config { dim, hidden_dim, vocab_size, .. } = *config;
    let kv = dim / config.n_heads * config.n_kv_heads;
    let mut shapes = vec![("tok_embeddings.weight".to_owned(), vec![vocab_size, dim])];
    for layer in 0..config.n_layers {
        let mut add =
            |name: &str, shape: &[usize]| shapes.push((format!("layers.{layer}.{name}.weight"), shape.to_vec()));
        add("attention.wq", &[dim, dim]);
        add("attention.wk", &[kv, dim]);
        add("attention.wv", &[kv, dim]);
        add("attention.wo", &[dim, dim]);
        add("feed_forward.w1", &[hidden_dim, dim]);
        add("feed_forward.w2", &[dim, hidden_dim]);
        add("feed_forward.w3", &[hidden_dim, dim]);
        add("attention_norm", &[dim]);
        add("ffn_norm", &[dim]);
    }
    shapes.push(("norm.weight".to_owned(), vec![dim]));
    if !config.tied_embeddings {
        shapes.push(("output.weight".to_owned(), vec![vocab_size, dim]));
    }
    shapes
}

/// A model of random values.
pub(crate) fn random_model(config: &Config, kind: Kind) -> Memory {
    let mut memory = Memory::new();
    for (name, shape) in shapes(config) {
        memory.insert(&name, &random(&shape, kind)).unwrap();
    }
    memory
}

pub(crate) fn random(shape: &[usize], kind: Kind) -> Tensor {
    let shape: Vec<i64> = shape.iter().map(|&length| length as i64).collect();
    Tensor::randn(shape, (Kind::Float, ferrotitan_checkpoint::tch::Device::Cpu)).to_kind(kind)
}

/// All bytes of a tensor.
pub(crate) fn whole(source: &dyn Source, name: &str) -> Vec<u8> {
    let info = &source.tensors()[name];
    let mut bytes = vec![0; info.bytes().unwrap()];
    source.read(name, &Region::whole(&info.shape), &mut bytes).unwrap();
    bytes
}

/// A region of a tensor, element by element, from all its bytes.
pub(crate) fn dense(bytes: &[u8], size: usize, shape: &[usize], region: &Region) -> Vec<u8> {
    let mut out = Vec::new();
    let mut index = region.offset.clone();
    for _ in 0..region.numel() {
        let at = index.iter().zip(shape).fold(0, |at, (index, length)| at * length + index) * size;
        out.extend_from_slice(&bytes[at..at + size]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            if index[axis] < region.offset[axis] + region.shape[axis] {
                break;
            }
            index[axis] = region.offset[axis];
        }
    }
    out
}

/// Where a region begins and ends along each axis, as fractions of the axis.
pub(crate) type Cut = Vec<(f64, f64)>;

pub(crate) fn cut() -> impl Strategy<Value = Cut> {
    prop::collection::vec((0.0..1.0, 0.0..1.0), 4)
}

pub(crate) fn region(shape: &[usize], cut: &Cut) -> Region {
    let (offset, shape) = shape
        .iter()
        .zip(cut)
        .map(|(&length, &(a, b))| {
            let at = |fraction: f64| (fraction * (length + 1) as f64) as usize;
            (at(a.min(b)), at(a.max(b)) - at(a.min(b)))
        })
        .unzip();
    Region { offset, shape }
}

/// Reads regions of every tensor and compares them with `expected`, which gives all bytes of a tensor.
pub(crate) fn check_regions(
    source: &dyn Source,
    cuts: &[Cut],
    expected: impl Fn(&str) -> Vec<u8>,
) -> Result<(), TestCaseError> {
    for (name, info) in source.tensors() {
        let bytes = expected(name);
        for cut in cuts {
            let region = region(&info.shape, cut);
            let mut found = vec![0xaa; region.numel() * info.dtype.size()];
            source.read(name, &region, &mut found).unwrap();
            let expected = dense(&bytes, info.dtype.size(), &info.shape, &region);
            prop_assert_eq!(&found, &expected, "{} {:?}", name, region);
        }
    }
    Ok(())
}
