//! What is refused, and in which words.

#![allow(clippy::unwrap_used, missing_docs)]

mod shards;

use ferrotitan_checkpoint::comm::{BoxError, DeviceMesh, threads};
use ferrotitan_checkpoint::mesh::{Degrees, Layout, Mesh, Parts, Region, View};
use ferrotitan_checkpoint::{
    Checkpoint, Dtype, Error, Item, LoadOptions, Mode, SaveOptions, Saver, Source, Store, Which, load, save, steps,
};
use serde_json::{Value, json};
use shards::Global;
use tch::{Device, Kind, Tensor};

fn single() -> DeviceMesh {
    DeviceMesh::single(Device::Cpu)
}

fn saved() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let items = [("a", vec![4, 6]), ("b", vec![3])].map(|(name, shape)| {
        let global = Global::new(name, Dtype::F32, &shape, 1);
        global.item(&Layout::replicated(&shape), &single())
    });
    save(&store, &single(), 3, items, json!({"x": 1})).unwrap();
    (folder, store)
}

fn zeros(name: &str, shape: &[usize], kind: Kind) -> Item {
    let size: Vec<i64> = shape.iter().map(|&length| length as i64).collect();
    Item::new(name, Layout::replicated(shape), Tensor::zeros(size, (kind, Device::Cpu)))
}

#[test]
fn loads_that_do_not_fit() {
    let (_folder, store) = saved();
    let checkpoint = Checkpoint::open(&store, Which::Step(3)).unwrap();
    let says = |items: Vec<Item>, options| load(&checkpoint, items, &single(), &options).unwrap_err().to_string();
    let plain = LoadOptions::default();
    let told = says(vec![zeros("a", &[4, 6], Kind::Float), zeros("c", &[1], Kind::Float)], plain);
    assert_eq!(told, "the checkpoint lacks 1 tensors that the model has: c");
    let told = says(vec![zeros("a", &[4, 6], Kind::Float)], LoadOptions { exact: true, ..plain });
    assert_eq!(told, "the checkpoint has 1 tensors that the model lacks: b");
    let told = says(vec![zeros("a", &[6, 4], Kind::Float)], plain);
    assert_eq!(told, "tensor a has shape [4, 6] in the checkpoint, but [6, 4] in the model");
    let told = says(vec![zeros("a", &[4, 6], Kind::BFloat16)], plain);
    assert_eq!(told, "tensor a is F32 in the checkpoint, but BF16 in the model; allow casts to load it");
    let told = Checkpoint::open(&store, Which::Step(4)).unwrap_err().to_string();
    assert!(told.ends_with("has no checkpoint of step 4; there are steps [3]"), "{told}");
    let told = Checkpoint::open(&store.below("else"), Which::Latest).unwrap_err().to_string();
    assert!(told.contains("/else has no checkpoint; no step was saved there"), "{told}");
    let mut out = [0; 4];
    let outside = Region { offset: vec![3], shape: vec![1] };
    assert!(matches!(checkpoint.read("b", &outside, &mut out), Err(Error::Region { .. })));
    assert!(matches!(checkpoint.read("c", &outside, &mut out), Err(Error::NoTensor { .. })));
}

#[test]
fn a_cast_converts_values() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let values = Tensor::from_slice(&[1.0_f32, -2.5, 1e9]);
    save(&store, &single(), 1, [Item::new("v", Layout::replicated(&[3]), values)], Value::Null).unwrap();
    let item = zeros("v", &[3], Kind::Double);
    let tensor = item.tensor.shallow_clone();
    let checkpoint = Checkpoint::open(&store, Which::Latest).unwrap();
    load(&checkpoint, [item], &single(), &LoadOptions { cast: true, ..LoadOptions::default() }).unwrap();
    assert_eq!(Vec::<f64>::try_from(&tensor).unwrap(), [1.0, -2.5, 1e9]);
}

#[test]
fn items_that_cannot_be_saved() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let says = |items: Vec<Item>| save(&store, &single(), 1, items, Value::Null).unwrap_err().to_string();
    let item = || zeros("a", &[2], Kind::Float);
    assert_eq!(says(vec![item(), item()]), "tensor a: it is given twice; names must differ");
    let other = Item { tensor: Tensor::zeros([3], (Kind::Float, Device::Cpu)), ..item() };
    assert_eq!(says(vec![other]), "tensor a: this rank's shard has shape [3], but its layout says [2]");
    let sum = Item { layout: Layout::replicated(&[2]).with_partial(View::TP).unwrap(), ..item() };
    assert!(says(vec![sum]).contains("reduce it first"));
    assert!(says(vec![zeros("__metadata__", &[2], Kind::Float)]).contains("keeps this name for itself"));
    assert!(steps(&store).unwrap().is_empty());
}

/// A tensor of which one rank forgets its part is no checkpoint, and all ranks are told.
#[test]
fn a_part_that_nobody_gives() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let two = Degrees { tp: 2, ..Degrees::default() };
    let told = threads::run(two, &threads::Options::default(), |mesh| -> Result<_, BoxError> {
        let rows = Layout::replicated(&[4]).shard(View::TP, 0, Parts::Even)?;
        let mine = Item::new("w", rows, Tensor::zeros([2], (Kind::Float, Device::Cpu)));
        let items = (mesh.rank() == 0).then_some(mine);
        Ok(save(&store, &mesh, 1, items, Value::Null).unwrap_err().to_string())
    });
    for told in told.unwrap() {
        assert!(told.contains("step 1 is not saved") && told.contains("tensor w: its parts hold 2 of 4"), "{told}");
    }
}

#[test]
fn keeps_the_latest_and_the_one_just_saved() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let run = |numbers: &[u64], keep_latest_k, mode| {
        let options = SaveOptions { keep_latest_k, mode, ..SaveOptions::default() };
        let mut saver = Saver::new(store.clone(), single(), options);
        let mut ends = Vec::new();
        for &step in numbers {
            ends.extend(saver.save(step, [zeros("a", &[5], Kind::Half)], Value::Null).unwrap());
        }
        ends.extend(saver.finish().unwrap());
        // Each save's numbers come once, in order.
        assert_eq!(ends.iter().map(|end| end.step).collect::<Vec<_>>(), numbers);
        assert!(ends.iter().all(|end| end.bytes == 10 && end.files == 1));
        steps(&store).unwrap()
    };
    assert_eq!(run(&[1, 2, 10], 0, Mode::Async), [1, 2, 10]);
    assert_eq!(run(&[9], 2, Mode::Sync), [9, 10]);
    assert_eq!(run(&[5], 1, Mode::Async), [5]);
}

/// A manifest with any content and a right checksum is still believed in nothing.
#[test]
fn hostile_manifests() {
    let (folder, store) = saved();
    let path = folder.path().join("step-3/manifest.json");
    let whole: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let write = |value: &Value| {
        let mut content = value.clone();
        content.as_object_mut().unwrap().remove("crc32c");
        let mut text = content.to_string();
        text.pop();
        let sum = crc32c::crc32c(text.as_bytes());
        std::fs::write(&path, format!("{text},\"crc32c\":\"{sum:08x}\"}}\n")).unwrap();
    };
    write(&whole);
    Checkpoint::open(&store, Which::Latest).unwrap().verify(|_| ()).unwrap();
    let part = whole["tensors"]["a"]["parts"][0].clone();
    let edits = [
        ("/format", json!("another")),
        ("/version", json!(2)),
        ("/step", json!(4)),
        ("/tensors/a/dtype", json!("F4")),
        ("/tensors/a/dtype", json!("F64")),
        ("/tensors/a/shape", json!([1_u64 << 62, 1_u64 << 62])),
        ("/tensors/a/shape", json!([4, 7])),
        ("/tensors/a/shape", json!([])),
        ("/tensors/a/shape", json!([-1, 6])),
        ("/tensors/a/parts", json!([])),
        ("/tensors/a/parts", json!([part, part])),
        ("/tensors/a/parts/0/bytes", json!([0, u64::MAX])),
        ("/tensors/a/parts/0/bytes", json!([100, 4])),
        ("/tensors/a/parts/0/offset", json!([u64::MAX, 0])),
        ("/tensors/a/parts/0/offset", json!([0])),
        ("/tensors/a/parts/0/shape", json!([4, 6, 1])),
        ("/tensors/a/parts/0/shape", json!([0, 6])),
        ("/tensors/a/parts/0/crc32c", json!([])),
        ("/tensors/a/parts/0/file", json!("../../../etc/passwd")),
        ("/tensors/b", json!(null)),
        ("/files", json!({})),
    ];
    for (place, value) in edits {
        let mut damaged = whole.clone();
        *damaged.pointer_mut(place).unwrap() = value.clone();
        write(&damaged);
        let told = Checkpoint::open(&store, Which::Latest).unwrap_err();
        let named = told.to_string().contains("step-3/manifest.json is damaged");
        assert!(matches!(told, Error::Damaged { .. }) && named, "{place} = {value}: {told}");
    }
    // A file that is not there, or is outside of the folder, however it is listed.
    for file in ["../outside", "/etc/passwd", "absent"] {
        let mut damaged = whole.clone();
        damaged["files"][file] = json!({"bytes": u64::MAX, "header_bytes": u64::MAX, "header_crc32c": 0});
        for name in ["a", "b"] {
            damaged["tensors"][name]["parts"][0]["file"] = json!(file);
        }
        write(&damaged);
        let checkpoint = Checkpoint::open(&store, Which::Latest).unwrap();
        let told = load(&checkpoint, [zeros("a", &[4, 6], Kind::Float)], &single(), &LoadOptions::default());
        assert!(told.unwrap_err().to_string().contains("tensor a"), "{file}");
        checkpoint.verify(|_| ()).unwrap_err();
    }
    std::fs::write(&path, "[".repeat(100_000) + ",\"crc32c\":\"00000000\"}\n").unwrap();
    assert!(matches!(Checkpoint::open(&store, Which::Latest), Err(Error::Damaged { .. })));
}
