//! Hugging Face's Llama, without Python.

use std::fs;
use std::path::Path;

use ferrotitan_checkpoint::interchange::hugging_face::{Config, Export, Model, Options, write};
use ferrotitan_checkpoint::interchange::{Memory, Opened, open};
use ferrotitan_checkpoint::mesh::Region;
use ferrotitan_checkpoint::tch::Kind;
use ferrotitan_checkpoint::{Dtype, Error, Source, Store, Which};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{check_regions, config, cut, random_model, whole};

fn store(folder: &Path) -> Store {
    Store::open(folder.to_str().unwrap()).unwrap()
}

fn ignore(_: u64, _: u64) {}

fn shape() -> impl Strategy<Value = Config> {
    (1_usize..3, 1_usize..4, 1_usize..4, 1_usize..4, 1_usize..9, any::<bool>()).prop_map(
        |(n_layers, n_kv_heads, group, half, hidden_dim, tied_embeddings)| Config {
            n_layers,
            n_kv_heads,
            n_heads: n_kv_heads * group,
            dim: n_kv_heads * group * half * 2,
            hidden_dim,
            vocab_size: 11,
            tied_embeddings,
            ..config()
        },
    )
}

/// What a projection of ours is in Hugging Face's order of rows, as its conversion script has it: a view of
/// `[heads, half, 2, columns]`, its middle axes exchanged.
fn permuted(ours: &[u8], heads: usize, row: usize) -> Vec<u8> {
    let rows = ours.len() / row;
    let half = rows / heads / 2;
    let mut theirs = Vec::new();
    for head in 0..heads {
        for pair in 0..2 {
            for feature in 0..half {
                let at = (head * half + feature) * 2 + pair;
                theirs.extend_from_slice(&ours[at * row..(at + 1) * row]);
            }
        }
    }
    theirs
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn what_is_written_is_read_region_by_region(
        config in shape(), kind in prop::sample::select(vec![Kind::BFloat16, Kind::Half, Kind::Float, Kind::Double]),
        max_shard_bytes in 1_u64..3000, cuts in prop::collection::vec(cut(), 4)
    ) {
        let folder = tempfile::tempdir().unwrap();
        let ours = random_model(&config, kind);
        let store = store(folder.path());
        let options = Options { max_shard_bytes, ..Options::new(config.clone()) };
        let mut told = (0, 0);
        write(&ours, &store, &options, &mut |done, total| told = (done, total)).unwrap();
        let bytes: usize = ours.tensors().values().map(|info| info.bytes().unwrap()).sum();
        prop_assert_eq!(told, (bytes as u64, bytes as u64));

        let model = Model::open(store.clone()).unwrap();
        prop_assert_eq!(model.config(), &config);
        prop_assert_eq!(model.tensors(), ours.tensors());
        check_regions(&model, &cuts, |name| whole(&ours, name))?;

        // The files are as any reader of safetensors finds them, and the rows are Hugging Face's.
        let mut found = 0;
        for entry in fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let file = fs::read(path).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
            let bytes: usize = tensors.tensors().iter().map(|(_, tensor)| tensor.data().len()).sum();
            prop_assert!(tensors.len() == 1 || bytes as u64 <= max_shard_bytes);
            for (name, tensor) in tensors.tensors() {
                found += 1;
                for (theirs, ours_name, heads) in [("q_proj", "wq", config.n_heads), ("k_proj", "wk", config.n_kv_heads)] {
                    if name == format!("model.layers.0.self_attn.{theirs}.weight") {
                        let expected = whole(&ours, &format!("layers.0.attention.{ours_name}.weight"));
                        let row = config.dim * model.tensors()["norm.weight"].dtype.size();
                        prop_assert_eq!(tensor.data(), permuted(&expected, heads, row));
                    }
                }
            }
        }
        prop_assert_eq!(found, ours.tensors().len());
    }
}

#[test]
fn ranks_share_the_files_and_change_the_dtype() {
    let (folder, config) = (tempfile::tempdir().unwrap(), config());
    let ours = random_model(&config, Kind::Float);
    let options = Options { dtype: Some(Dtype::Bf16), max_shard_bytes: 5000, ..Options::new(config) };
    let store = store(folder.path());
    let files = Export::new(&ours, &options).unwrap().files();
    assert!(files > 3);
    for rank in [2, 0, 1] {
        let export = Export::new(&ours, &options).unwrap();
        if rank == 1 {
            // Not all is there yet, so the model is not complete.
            assert!(matches!(export.finish(&store), Err(Error::NotFound { .. })));
            assert!(matches!(Model::open(store.clone()), Err(Error::NotFound { .. })));
        }
        for file in (rank..files).step_by(3) {
            export.write_file(&store, file, &mut |_| ()).unwrap();
        }
    }
    Export::new(&ours, &options).unwrap().finish(&store).unwrap();
    let Opened::HuggingFace(model) = open(&store, Which::Latest).unwrap() else { panic!("it is a model") };
    let name = "layers.1.attention.wk.weight";
    assert_eq!(model.tensors()[name].dtype, Dtype::Bf16);
    let upper: Vec<u8> = whole(&ours, name)
        .chunks_exact(4)
        .flat_map(|bytes| {
            // To the nearest, ties to even.
            let bits = u32::from_le_bytes(bytes.try_into().unwrap());
            (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes()
        })
        .collect();
    assert_eq!(whole(&*model, name), upper);
    let config: Value = serde_json::from_slice(&fs::read(folder.path().join("config.json")).unwrap()).unwrap();
    assert_eq!(config["torch_dtype"], "bfloat16");
    let table = Opened::HuggingFace(model).inspect();
    let row = table.iter().find(|row| row.name == name).unwrap();
    assert_eq!((row.bytes, row.parts, row.files.len()), (16 * 32 * 2, 1, 1));
}

/// A small model in a folder of its own.
fn written(max_shard_bytes: u64) -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { dim: 4, n_layers: 1, n_heads: 2, n_kv_heads: 1, hidden_dim: 3, vocab_size: 5, ..config() };
    let store = store(folder.path());
    let options = Options { max_shard_bytes, ..Options::new(config.clone()) };
    write(&random_model(&config, Kind::Float), &store, &options, &mut ignore).unwrap();
    (folder, store)
}

fn read_all(model: &dyn Source) -> Result<(), Error> {
    for (name, info) in model.tensors() {
        model.read(name, &Region::whole(&info.shape), &mut vec![0; info.bytes().unwrap()])?;
    }
    Ok(())
}

#[test]
fn every_truncation_is_refused() {
    let (folder, store) = written(u64::MAX);
    for file in ["model.safetensors", "config.json"] {
        let path = folder.path().join(file);
        let bytes = fs::read(&path).unwrap();
        let end = bytes.trim_ascii_end().len();
        for length in 0..end {
            fs::write(&path, &bytes[..length]).unwrap();
            let error = Model::open(store.clone()).unwrap_err().to_string();
            assert!(error.contains(file), "{length}: {error}");
        }
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        assert!(Model::open(store.clone()).is_err());
        fs::write(&path, &bytes).unwrap();
    }
    read_all(&Model::open(store).unwrap()).unwrap();
}

#[test]
fn flipped_bits_of_headers_never_panic() {
    let (folder, store) = written(u64::MAX);
    for file in ["model.safetensors", "config.json"] {
        let path = folder.path().join(file);
        let bytes = fs::read(&path).unwrap();
        let mut refused = 0;
        for at in 0..bytes.len().min(1600) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            fs::write(&path, &flipped).unwrap();
            match Model::open(store.clone()) {
                Ok(model) => read_all(&model).unwrap(),
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 300, "{file}: {refused}");
        fs::write(&path, &bytes).unwrap();
    }
}

#[test]
fn absurd_sizes_are_refused() {
    let (folder, store) = written(u64::MAX);
    let path = folder.path().join("model.safetensors");
    let huge = u64::MAX.to_le_bytes();
    let header = |json: &str| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    let overlap = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let large = r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#;
    for bytes in [huge.to_vec(), [&huge[..], b"{}"].concat(), header(overlap), header(large), header("[[[[[[")] {
        fs::write(&path, bytes).unwrap();
        let error = Model::open(store.clone()).unwrap_err();
        assert!(matches!(&error, Error::Damaged { object, .. } if object.ends_with("model.safetensors")), "{error}");
    }
    change(folder.path(), "config.json", |config| config["num_hidden_layers"] = json!(1_u64 << 30));
    change(folder.path(), "config.json", |config| config["vocab_size"] = json!(1_u64 << 62));
    assert!(Model::open(store).is_err());
}

fn change(folder: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = folder.join(file);
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

#[test]
fn an_index_that_lies_is_refused() {
    let (folder, store) = written(100);
    let index = "model.safetensors.index.json";
    let good = fs::read(folder.path().join(index)).unwrap();
    let refused = |new: &dyn Fn(&mut Value), word: &str| {
        change(folder.path(), index, new);
        let error = Model::open(store.clone()).unwrap_err().to_string();
        assert!(error.contains(word), "{error} lacks {word}");
        fs::write(folder.path().join(index), &good).unwrap();
    };
    let norm = "model.norm.weight";
    refused(&|json| json["weight_map"][norm] = "elsewhere.safetensors".into(), "elsewhere.safetensors");
    refused(&|json| json["weight_map"][norm] = "../model.safetensors".into(), "no file of this folder");
    refused(&|json| json["weight_map"][norm] = json["weight_map"]["lm_head.weight"].clone(), norm);
    refused(&|json| json["weight_map"]["ghost"] = json["weight_map"][norm].clone(), "ghost");
    refused(&|json| *json = json!({}), "weight_map");
    read_all(&Model::open(store).unwrap()).unwrap();
}

#[test]
fn other_models_are_refused_by_name() {
    let (folder, store) = written(u64::MAX);
    let path = folder.path().join("config.json");
    let good = fs::read(&path).unwrap();
    let scaling = |kind: &str| json!({ "rope_type": kind, "factor": 2.0 });
    let cases = [
        ("model_type", json!("mixtral"), "mixtral"),
        ("architectures", json!(["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        ("attention_bias", json!(true), "attention_bias"),
        ("mlp_bias", json!(true), "mlp_bias"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("sliding_window", json!(4096), "sliding_window"),
        ("quantization_config", json!({ "quant_method": "fp8" }), "quantization_config"),
        ("head_dim", json!(64), "head_dim = 64"),
        ("rope_parameters", scaling("yarn"), "yarn"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor"),
        ("logits_scaling", json!(8.0), "logits_scaling"),
        ("num_attention_heads", json!(0), "size is 0"),
        ("num_key_value_heads", json!(7), "7 key-value heads"),
        ("hidden_size", json!("wide"), "hidden_size"),
        ("vocab_size", json!(6), "embed_tokens"),
    ];
    for (key, value, word) in cases {
        change(folder.path(), "config.json", |config| config[key] = value);
        let error = Model::open(store.clone()).unwrap_err().to_string();
        assert!(error.contains(word), "{error} lacks {word}");
        fs::write(&path, &good).unwrap();
    }
    change(folder.path(), "config.json", |config| config["num_hidden_layers"] = json!(2));
    assert!(matches!(Model::open(store.clone()), Err(Error::Lacking { .. })));
    fs::write(&path, &good).unwrap();
    // The older spelling of the same.
    change(folder.path(), "config.json", |config| {
        config.as_object_mut().unwrap().remove("rope_parameters");
    });
    let config = Model::open(store.clone()).unwrap().config().clone();
    assert_eq!(config.rope_scaling, crate::support::config().rope_scaling);
    assert_eq!(config.rope_theta, 10_000.0);
}

#[test]
fn tensors_beyond_the_model_are_refused_and_copies_of_a_tied_table_ignored() {
    let (folder, store) = written(u64::MAX);
    change(folder.path(), "config.json", |config| config["tie_word_embeddings"] = json!(true));
    let tied = Model::open(store.clone()).unwrap();
    assert!(!tied.tensors().contains_key("output.weight"));
    let mut file = Memory::new();
    for (name, shape) in crate::support::shapes(tied.config()) {
        file.insert(&name, &crate::support::random(&shape, Kind::Float8e4m3fn)).unwrap();
    }
    let error = Export::new(&file, &Options::new(tied.config().clone())).unwrap_err().to_string();
    assert!(error.contains("F8_E4M3"), "{error}");

    // Scales of a quantized weight.
    let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let norm = header.as_object_mut().unwrap().remove("model.norm.weight").unwrap();
    header["model.norm.weight_scale_inv"] = norm.clone();
    let rewrite = |header: &Value| {
        let header = header.to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat();
        fs::write(folder.path().join("model.safetensors"), file).unwrap();
    };
    rewrite(&header);
    assert!(matches!(Model::open(store.clone()), Err(Error::Lacking { .. })));
    header["model.norm.weight"] = norm.clone();
    header.as_object_mut().unwrap().remove("model.norm.weight_scale_inv");
    header["model.norm.weight"]["dtype"] = json!("I32");
    rewrite(&header);
    let error = Model::open(store).unwrap_err().to_string();
    assert!(error.contains("quantized"), "{error}");
}

#[test]
fn a_folder_with_another_model_is_left_alone() {
    let (folder, store) = written(u64::MAX);
    let config = Model::open(store.clone()).unwrap().config().clone();
    let options = Options { max_shard_bytes: 1, ..Options::new(config.clone()) };
    let error = write(&random_model(&config, Kind::Float), &store, &options, &mut ignore).unwrap_err().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    assert!(!folder.path().join("model.safetensors.index.json").exists());
    // The same model again is none other.
    write(&random_model(&config, Kind::Float), &store, &Options::new(config), &mut ignore).unwrap();
}

#[test]
fn what_is_not_the_model_cannot_be_written() {
    let (folder, config) = (tempfile::tempdir().unwrap(), config());
    let store = store(folder.path());
    let refused = |source: &dyn Source, config: &Config, word: &str| {
        let error = write(source, &store, &Options::new(config.clone()), &mut ignore).unwrap_err().to_string();
        assert!(error.contains(word), "{error} lacks {word}");
    };
    let model = random_model(&config, Kind::Float);
    refused(&model, &Config { n_layers: 3, ..config.clone() }, "layers.2.attention.wq.weight");
    refused(&model, &Config { hidden_dim: 47, ..config.clone() }, "[48, 32]");
    refused(&model, &Config { n_heads: 0, ..config.clone() }, "size is 0");
    refused(&model, &Config { n_heads: 32, ..config.clone() }, "even size");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
