//! Other formats into this crate's own, and out of it.

use ferrotitan_checkpoint::interchange::dcp::Folder;
use ferrotitan_checkpoint::interchange::hugging_face::{Model, Options, write};
use ferrotitan_checkpoint::interchange::{Memory, Opened, convert, diff, open};
use ferrotitan_checkpoint::tch::{Device, Kind, Tensor};
use ferrotitan_checkpoint::{Checkpoint, Error, Source, Store, Which};
use serde_json::json;

use crate::support::{beside, config, random_model};

fn same(a: &dyn Source, b: &dyn Source) {
    assert_eq!(a.tensors(), b.tensors());
    assert_eq!(diff(a, b, &mut |_, _| ()).unwrap(), []);
}

#[test]
fn a_model_goes_from_format_to_format_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let config = config();
    let ours = random_model(&config, Kind::BFloat16);
    let mut told = (0, 1);
    convert(&ours, &store, 7, json!({ "from": "memory" }), &mut |done, total| told = (done, total)).unwrap();
    assert_eq!(told.0, told.1);

    let native = open(&store, Which::Latest).unwrap();
    same(&native, &ours);
    let Opened::Native(checkpoint) = &native else { panic!("it is one of this crate") };
    assert_eq!((checkpoint.step(), checkpoint.state()), (7, &json!({ "from": "memory" })));
    checkpoint.verify(|_| ()).unwrap();
    let rows = native.inspect();
    assert!(rows.len() == ours.tensors().len() && rows.iter().all(|row| row.parts == 1 && row.files.len() == 1));

    let export = store.below("hf");
    write(&native, &export, &Options { max_shard_bytes: 3000, ..Options::new(config) }, &mut |_, _| ()).unwrap();
    let model = Model::open(export).unwrap();
    same(&model, &ours);
    convert(&model, &store, 8, json!({}), &mut |_, _| ()).unwrap();
    same(&Checkpoint::open(&store, Which::Step(8)).unwrap(), &ours);

    let error = convert(&model, &store, 8, json!({}), &mut |_, _| ()).unwrap_err();
    assert!(matches!(error, Error::StepExists { step: 8, .. }), "{error}");
}

#[test]
fn pytorch_folders_become_checkpoints() {
    for name in ["golden/plain", "golden/sharded"] {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        let theirs = Folder::open(Store::open(beside(name).to_str().unwrap()).unwrap()).unwrap();
        convert(&theirs, &store, 0, json!(null), &mut |_, _| ()).unwrap();
        let checkpoint = Checkpoint::open(&store, Which::Step(0)).unwrap();
        same(&checkpoint, &theirs);
        checkpoint.verify(|_| ()).unwrap();
    }
}

#[test]
fn what_is_larger_than_a_read_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let mut ours = Memory::new();
    ours.insert("large", &Tensor::arange(3_500_000, (Kind::Int64, Device::Cpu)).view([7, 500_000])).unwrap();
    ours.insert("byte", &Tensor::from_slice(&[7_u8])).unwrap();
    ours.insert("empty", &Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))).unwrap();
    ours.insert("scalar", &Tensor::from(0.5)).unwrap();
    convert(&ours, &store, 1, json!(null), &mut |_, _| ()).unwrap();
    same(&Checkpoint::open(&store, Which::Latest).unwrap(), &ours);
}
