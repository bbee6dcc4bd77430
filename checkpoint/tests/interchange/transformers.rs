//! Models written here run in `transformers`, and those that it writes run here, with equal logits.

use std::fs;
use std::path::Path;
use std::process::Command;

use ferrotitan_checkpoint::interchange::Memory;
use ferrotitan_checkpoint::interchange::hugging_face::{Config, Model, Options, write};
use ferrotitan_checkpoint::mesh::Grid;
use ferrotitan_checkpoint::tch::{self, Device, Kind, Tensor};
use ferrotitan_checkpoint::{Dtype, Source, Store};
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{Batch, Materialize, RopeScaling};
use serde_json::{Value, json};

use crate::support::{beside, config, python, random_model, whole};

const SEQ: usize = 24;

/// Models of every kind.
fn cases() -> Vec<(&'static str, Config)> {
    vec![
        ("grouped", config()),
        ("tied", Config { tied_embeddings: true, rope_scaling: None, ..config() }),
        ("alone", Config { n_kv_heads: 1, rope_theta: 500_000.0, ..config() }),
        ("equal", Config { n_kv_heads: 4, rope_scaling: None, ..config() }),
    ]
}

/// Its logits in Ferrotitan.
fn logits(source: &dyn Source, config: &Config, kind: Kind, tokens: &[Vec<i64>]) -> Tensor {
    let shape = LlamaConfig {
        dim: config.dim,
        n_layers: config.n_layers,
        n_heads: config.n_heads,
        n_kv_heads: config.n_kv_heads,
        hidden_dim: config.hidden_dim,
        norm_eps: config.norm_eps,
        rope_theta: config.rope_theta,
        rope_scaling: config.rope_scaling.map(|scaling| RopeScaling {
            factor: scaling.factor,
            low_frequency_factor: scaling.low_frequency_factor,
            high_frequency_factor: scaling.high_frequency_factor,
            original_context: scaling.original_context,
        }),
        tied_embeddings: config.tied_embeddings,
        ..LlamaConfig::flavor("debugmodel", config.vocab_size).unwrap()
    };
    let mut model = build(&shape).unwrap();
    let how = Materialize { seed: 1, kind, compute: None, device: Device::Cpu };
    model.materialize(&how, &Grid::single()).unwrap();
    let parameters = model.parameters();
    assert_eq!(parameters.len(), source.tensors().len());
    for parameter in parameters {
        let info = &source.tensors()[parameter.name()];
        let local = parameter.local().unwrap();
        let values = Tensor::from_data_size(&whole(source, parameter.name()), &local.size(), info.dtype.kind());
        tch::no_grad(|| local.shallow_clone().copy_(&values));
    }
    let tokens = Tensor::from_slice2(tokens);
    tch::no_grad(|| model.forward(&Batch::new(tokens, None).unwrap()).unwrap())
}

fn name_of(kind: Kind) -> &'static str {
    if kind == Kind::Double { "float64" } else { "float32" }
}

fn job(folder: &Path, kind: Kind, tokens: &[Vec<i64>]) -> Value {
    json!({ "folder": folder, "dtype": name_of(kind), "tokens": tokens, "out": folder.with_extension("logits") })
}

fn assert_close(name: &str, ours: &Tensor, folder: &Path, kind: Kind) {
    let bytes = fs::read(folder.with_extension("logits")).unwrap();
    let theirs = Tensor::from_data_size(&bytes, &ours.size(), kind);
    let scale = theirs.abs().max().double_value(&[]);
    let error = (ours - &theirs).abs().max().double_value(&[]);
    let allowed = if kind == Kind::Double { 1e-10 } else { 1e-5 };
    eprintln!("{name} {kind:?}: off by {error:e} of {scale:e}");
    assert!(scale > 0.1 && error <= allowed * scale, "{name} {kind:?}: off by {error:e} of {scale:e}");
}

/// Runs the script; false, and told so, where it cannot run.
fn run(folder: &Path, jobs: &[Value]) -> bool {
    let Some(python) = python() else {
        eprintln!("SKIPPED: no Python with torch; set FERROTITAN_PYTHON to one, or run `cargo xtask test`");
        return false;
    };
    let file = folder.join("jobs.json");
    fs::write(&file, json!(jobs).to_string()).unwrap();
    let run = Command::new("timeout")
        .args(["400".as_ref(), python.as_os_str(), beside("logits.py").as_os_str(), file.as_os_str()])
        .envs([("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "1"), ("OMP_NUM_THREADS", "1")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    if run.status.code() == Some(77) {
        eprintln!(
            "SKIPPED: {} cannot import transformers ({}); `pip install transformers` there",
            python.display(),
            said.trim()
        );
        return false;
    }
    assert!(run.status.success(), "{said}");
    true
}

#[test]
fn logits_are_equal_both_ways() {
    tch::set_num_threads(1);
    tch::manual_seed(3);
    let folder = tempfile::tempdir().unwrap();
    let tokens: Vec<Vec<i64>> =
        [17, 23].map(|stride| (0..SEQ as i64).map(|at| (at * stride + 5) % 61).collect()).to_vec();
    let (mut jobs, mut checks) = (Vec::new(), Vec::new());
    for (name, config) in cases() {
        for kind in [Kind::Float, Kind::Double] {
            // One file, and several.
            let max_shard_bytes = if kind == Kind::Float { u64::MAX } else { 9000 };
            let ours = folder.path().join(format!("ours-{name}-{}", name_of(kind)));
            let mut model = Memory::new();
            let random = random_model(&config, kind);
            for (name, info) in random.tensors() {
                let values = Tensor::from_data_size(
                    &whole(&random, name),
                    &info.shape.iter().map(|&length| length as i64).collect::<Vec<_>>(),
                    kind,
                );
                model.insert(name, &(values * 0.3)).unwrap();
            }
            let store = Store::open(ours.to_str().unwrap()).unwrap();
            let options = Options { max_shard_bytes, ..Options::new(config.clone()) };
            write(&model, &store, &options, &mut |_, _| ()).unwrap();
            jobs.push(job(&ours, kind, &tokens));
            let expected = logits(&model, &config, kind, &tokens);
            checks.push((format!("ours {name}"), ours, kind, Some(expected), config.clone()));

            let theirs = folder.path().join(format!("theirs-{name}-{}", name_of(kind)));
            let mut make = job(&theirs, kind, &tokens);
            make["make"] = arguments(&config);
            make["max_shard_size"] = if kind == Kind::Float { "10KB" } else { "1GB" }.into();
            jobs.push(make);
            checks.push((format!("theirs {name}"), theirs, kind, None, config.clone()));
        }
    }
    if !run(folder.path(), &jobs) {
        return;
    }
    for (name, folder, kind, ours, expected) in checks {
        let ours = ours.unwrap_or_else(|| {
            let model = Model::open(Store::open(folder.to_str().unwrap()).unwrap()).unwrap();
            assert_eq!(model.config(), &expected);
            assert!(model.tensors().values().all(|info| info.dtype == Dtype::of(kind).unwrap()));
            logits(&model, &expected, kind, &tokens)
        });
        assert_close(&name, &ours, &folder, kind);
    }
}

/// The same shape for `transformers.LlamaConfig`.
fn arguments(config: &Config) -> Value {
    let rope = match config.rope_scaling {
        None => json!({ "rope_type": "default", "rope_theta": config.rope_theta }),
        Some(scaling) => json!({
            "rope_type": "llama3",
            "rope_theta": config.rope_theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context as u64,
        }),
    };
    json!({
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "intermediate_size": config.hidden_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token,
        "eos_token_id": config.eos_tokens,
    })
}
