//! The Llama against a plain PyTorch implementation of it, in double precision.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use ferrotitan_mesh::Grid;
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{Batch, Documents, IGNORE_INDEX, Materialize, RopeScaling};
use tch::{Device, Kind, Tensor};

const BATCH: i64 = 2;
const SEQ: i64 = 24;

/// The Python that has torch: named by the environment, or the one whose libtorch this was built with.
fn python() -> Option<PathBuf> {
    let named = std::env::var_os("FERROTITAN_PYTHON").map(PathBuf::from);
    let beside = std::env::var_os("LIBTORCH")
        .and_then(|torch| Path::new(&torch).ancestors().nth(4).map(|environment| environment.join("bin/python")));
    named.or(beside).filter(|python| python.is_file())
}

fn config() -> LlamaConfig {
    LlamaConfig {
        dim: 32,
        n_layers: 3,
        n_heads: 4,
        n_kv_heads: 4,
        hidden_dim: 48,
        rope_theta: 10_000.0,
        // A short original context, so that all three bands of wavelengths occur.
        rope_scaling: Some(RopeScaling { original_context: 64.0, ..RopeScaling::default() }),
        ..LlamaConfig::flavor("debugmodel", 61).unwrap()
    }
}

/// Logits, loss and every gradient of both agree.
fn compare(config: &LlamaConfig, documents: &[[i64; SEQ as usize]; BATCH as usize]) {
    let Some(python) = python() else {
        eprintln!("SKIPPED: no Python with torch; set FERROTITAN_PYTHON to one, or run `cargo xtask test`");
        return;
    };
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let mut model = build(config).unwrap();
    let how = Materialize { seed: 7, kind: Kind::Double, compute: None, device: Device::Cpu };
    model.materialize(&how, &Grid::single()).unwrap();
    let pick = |stride: i64| (Tensor::arange(BATCH * SEQ, (Kind::Int64, Device::Cpu)) * stride).remainder(61);
    let tokens = pick(17).reshape([BATCH, SEQ]);
    let mut labels = pick(23).reshape([BATCH, SEQ]);
    let _ = labels.narrow(1, 3, 2).fill_(IGNORE_INDEX);
    labels = labels.contiguous();

    let write_i64 = |name: &str, t: &Tensor| {
        let values: Vec<i64> = t.reshape([-1]).try_into().unwrap();
        std::fs::write(folder.path().join(name), values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
            .unwrap();
    };
    write_i64("tokens", &tokens);
    write_i64("labels", &labels);
    write_i64("documents", &Tensor::from_slice(&documents.concat()));
    let mut shapes = serde_json::Map::new();
    for parameter in model.parameters() {
        let values: Vec<f64> = parameter.local().unwrap().detach().reshape([-1]).try_into().unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        std::fs::write(folder.path().join(parameter.name()), bytes).unwrap();
        shapes.insert(parameter.name().into(), parameter.layout().shape().into());
    }
    let description = serde_json::json!({
        "dim": config.dim, "n_layers": config.n_layers, "n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads,
        "norm_eps": config.norm_eps, "rope_theta": config.rope_theta, "tied": config.tied_embeddings,
        "rope_scaling": config.rope_scaling.map(|s| {
            [s.factor, s.low_frequency_factor, s.high_frequency_factor, s.original_context]
        }),
        "batch": BATCH, "seq": SEQ, "parameters": shapes,
    });
    std::fs::write(folder.path().join("config.json"), description.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/llama.py");
    let run = Command::new(python).arg(script).arg(folder.path()).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));

    let mut batch = Batch::new(tokens, None).unwrap();
    batch.documents = Some(Documents::from_ids(&documents.concat(), SEQ as usize).unwrap());
    let logits = model.forward(&batch).unwrap();
    batch.labels = Some(labels);
    let loss = model.forward(&batch).unwrap();
    loss.backward();
    let read = |name: &str| {
        let bytes = std::fs::read(folder.path().join(name)).unwrap();
        Tensor::from_slice(
            &bytes.chunks_exact(8).map(|v| f64::from_le_bytes(v.try_into().unwrap())).collect::<Vec<_>>(),
        )
    };
    assert_close("logits", &logits, &read("logits"));
    assert_close("loss", &loss, &read("loss"));
    for parameter in model.parameters() {
        let gradient = parameter.gradient().unwrap().expect("every parameter has a gradient");
        assert_close(parameter.name(), &gradient, &read(&format!("{}.grad", parameter.name())));
    }
}

fn assert_close(name: &str, ours: &Tensor, theirs: &Tensor) {
    let theirs = theirs.view_as(ours);
    let scale = theirs.abs().max().double_value(&[]);
    let error = (ours - &theirs).abs().max().double_value(&[]);
    assert!(scale > 0.0 && error <= 1e-10 * scale, "{name}: off by {error:e} of {scale:e}");
}

const ONE: [[i64; SEQ as usize]; BATCH as usize] = [[0; SEQ as usize]; BATCH as usize];

#[test]
fn equal_heads() {
    compare(&config(), &ONE);
}

#[test]
fn grouped_queries() {
    compare(&LlamaConfig { n_kv_heads: 2, ..config() }, &ONE);
}

#[test]
fn tied_embeddings() {
    compare(&LlamaConfig { tied_embeddings: true, ..config() }, &ONE);
}

#[test]
fn grouped_queries_tied_embeddings_and_packed_documents() {
    let mut documents = ONE;
    // Lengths 1, 8 and 15; 13 and 11.
    documents[0][1..9].fill(1);
    documents[0][9..].fill(2);
    documents[1][13..].fill(1);
    compare(&LlamaConfig { n_kv_heads: 1, tied_embeddings: true, ..config() }, &documents);
}
