//! PyTorch's distributed checkpoints: a small one that is kept here, and those that the PyTorch at hand writes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use ferrotitan_checkpoint::interchange::dcp::Folder;
use ferrotitan_checkpoint::interchange::{Opened, open};
use ferrotitan_checkpoint::mesh::Region;
use ferrotitan_checkpoint::{Dtype, Error, Result, Source, Store, Which};
use proptest::prelude::*;
use serde::Deserialize;

use crate::support::{beside, check_regions, cut, python, whole};

#[derive(Deserialize)]
struct Expected {
    dtype: String,
    shape: Vec<usize>,
    bytes: String,
}

fn store(folder: &Path) -> Store {
    Store::open(folder.to_str().unwrap()).unwrap()
}

fn expected(folder: &Path) -> BTreeMap<String, Expected> {
    serde_json::from_slice(&fs::read(folder.join("expected.json")).unwrap()).unwrap()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

/// Everything in a folder that the script wrote is read back.
fn check(folder: &Path, cases: u32) {
    let expected = expected(folder);
    let read = Folder::open(store(folder)).unwrap();
    assert!(read.tensors().keys().eq(expected.keys()), "{:?}", read.tensors().keys());
    let bytes: BTreeMap<_, _> = expected.iter().map(|(name, tensor)| (name.as_str(), unhex(&tensor.bytes))).collect();
    for (name, Expected { dtype, shape, .. }) in &expected {
        let info = &read.tensors()[name];
        let python = match info.dtype {
            Dtype::Bool => "bool",
            Dtype::U8 => "uint8",
            Dtype::I8 => "int8",
            Dtype::I16 => "int16",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
            Dtype::F8E4M3 => "float8_e4m3fn",
            Dtype::F8E5M2 => "float8_e5m2",
            Dtype::F16 => "float16",
            Dtype::Bf16 => "bfloat16",
            Dtype::F32 => "float32",
            Dtype::F64 => "float64",
            Dtype::C64 => "complex64",
            other => panic!("{other} was not written"),
        };
        assert_eq!((python, &info.shape), (dtype.as_str(), shape), "{name}");
        assert_eq!(whole(&read, name), bytes[name.as_str()], "{name}");
    }
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) };
    proptest!(config, |(cut in cut())| {
        check_regions(&read, &[cut], |name| bytes[name].clone())?;
    });
}

#[test]
fn the_kept_folders_are_read_in_any_region() {
    check(&beside("golden/plain"), 40);
    check(&beside("golden/sharded"), 100);
}

#[test]
fn what_this_pytorch_writes_is_read() {
    let Some(python) = python() else {
        eprintln!("SKIPPED: no Python with torch; set FERROTITAN_PYTHON to one, or run `cargo xtask test`");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = Command::new("timeout")
        .args(["300".as_ref(), python.as_os_str(), "-W".as_ref(), "ignore".as_ref(), beside("dcp.py").as_os_str()])
        .arg(folder.path())
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    check(&folder.path().join("plain"), 4);
    check(&folder.path().join("sharded"), 4);
}

#[test]
fn a_prefix_is_taken_off_and_other_entries_are_named() {
    let Opened::Dcp(folder) = open(&store(&beside("golden/plain")), Which::Latest).unwrap() else {
        panic!("it is PyTorch's");
    };
    let all = whole(&*folder, "model.parameter");
    let table = Opened::Dcp(folder).inspect();
    let row = table.iter().find(|row| row.name == "model.parameter").unwrap();
    assert_eq!((row.bytes, row.parts, row.files.as_slice()), (48, 1, &["__0_0.distcp".to_owned()][..]));

    let folder = Folder::open(store(&beside("golden/plain"))).unwrap();
    assert_eq!(folder.others(), ["optimizer.lr", "train_state.step", "train_state.history.0"]);
    let model = folder.under("model.");
    assert_eq!(whole(&model, "parameter"), all);
    assert!(!model.tensors().keys().any(|name| name.contains("exp_avg")));
    assert_eq!(model.others(), [""; 0]);
    let state = Folder::open(store(&beside("golden/plain"))).unwrap().under("optimizer.").under("state.");
    assert!(state.tensors().contains_key("w.exp_avg") && state.files("w.exp_avg").count() == 1);

    let sharded = open(&store(&beside("golden/sharded")), Which::Latest).unwrap();
    let rows = sharded.inspect();
    let row = rows.iter().find(|row| row.name == "model.rows").unwrap();
    assert_eq!((row.parts, row.files.len()), (2, 2));
}

/// A copy of a kept folder, to be damaged.
struct Copy {
    folder: tempfile::TempDir,
    metadata: Vec<u8>,
}

impl Copy {
    fn of(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(beside("golden").join(name)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        Copy { metadata: fs::read(folder.path().join(".metadata")).unwrap(), folder }
    }

    fn open(&self, metadata: &[u8]) -> Result<Folder> {
        fs::write(self.folder.path().join(".metadata"), metadata).unwrap();
        Folder::open(store(self.folder.path()))
    }

    /// What stands against reading all that is in it.
    fn read(&self) -> Result<()> {
        read_all(&Folder::open(store(self.folder.path()))?)
    }
}

fn read_all(folder: &Folder) -> Result<()> {
    for (name, info) in folder.tensors() {
        // What the metadata claims may be more than one would allocate.
        if let Some(bytes) = info.bytes().filter(|bytes| *bytes < 1 << 20) {
            folder.read(name, &Region::whole(&info.shape), &mut vec![0; bytes])?;
        }
    }
    Ok(())
}

#[test]
fn every_truncation_of_the_metadata_is_refused() {
    let copy = Copy::of("sharded");
    for length in 0..copy.metadata.len() {
        let error = copy.open(&copy.metadata[..length]).unwrap_err();
        assert!(matches!(&error, Error::Damaged { object, .. } if object.ends_with(".metadata")), "{length}: {error}");
    }
    read_all(&copy.open(&copy.metadata).unwrap()).unwrap();
}

#[test]
fn every_truncation_of_a_file_is_refused() {
    let copy = Copy::of("sharded");
    let path = copy.folder.path().join("__1_0.distcp");
    let file = fs::read(&path).unwrap();
    for length in (0..file.len()).step_by(7).chain([file.len() - 1]) {
        fs::write(&path, &file[..length]).unwrap();
        let error = copy.read().unwrap_err().to_string();
        assert!(error.contains("__1_0.distcp"), "{length}: {error}");
    }
    fs::remove_file(&path).unwrap();
    assert!(copy.read().unwrap_err().to_string().contains("__1_0.distcp"));
}

#[test]
fn flipped_bits_never_panic() {
    let copy = Copy::of("sharded");
    let mut refused = 0;
    for at in (0..copy.metadata.len()).step_by(3) {
        let mut metadata = copy.metadata.clone();
        metadata[at] ^= 1 << (at % 8);
        refused += usize::from(copy.open(&metadata).and_then(|folder| read_all(&folder)).is_err());
    }
    assert!(refused > copy.metadata.len() / 6, "{refused}");
    copy.open(&copy.metadata).unwrap();
    let path = copy.folder.path().join("__0_0.distcp");
    let file = fs::read(&path).unwrap();
    for at in (0..file.len()).step_by(9) {
        let mut damaged = file.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&path, &damaged).unwrap();
        let _ = copy.read();
    }
}

/// `NAME(*arguments)`, in a pickle.
fn call(module: &str, name: &str) -> Vec<u8> {
    [b"\x80\x04c", module.as_bytes(), b"\n", name.as_bytes(), b"\n(X\x02\0\0\0ls\x85R."].concat()
}

#[test]
fn nothing_is_run() {
    let copy = Copy::of("sharded");
    for (module, name) in [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("torch.serialization", "load"),
        ("torch", "Tensor"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("_codecs", "encode"),
    ] {
        let error = copy.open(&call(module, name)).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, Error::Unsupported { .. }), "{message}");
        assert!(message.contains(&format!("{module}.{name}")) && message.contains(".metadata"), "{message}");
    }
    // A known class of which nothing but the name is right.
    let error = copy.open(&call("torch", "Size")).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    // Instructions that no checkpoint needs: INST, OBJ, EXT1, PERSID, NEXT_BUFFER.
    for code in [b'i', b'o', 0x82, b'P', 0x97] {
        let error = copy.open(&[0x80, 4, code, b'.']).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
}

#[test]
fn claims_are_not_believed() {
    let copy = Copy::of("sharded");
    for pickle in [
        // A str of 4 GiB, one of 2^63 bytes, a tuple, a mark and a memo that are not there.
        &b"\x80\x04X\xff\xff\xff\xff."[..],
        b"\x80\x04\x8d\0\0\0\0\0\0\0\x80.",
        b"\x80\x04\x87.",
        b"\x80\x04t.",
        b"\x80\x04j\xff\xff\xff\xff.",
        b"\x80\x04(K\x01\x85.",
        b"\x80\x04(a.",
        b"\x80\x04}b.",
        b"\x80\x04\x8a\xff.",
        b".",
        b"",
    ] {
        let error = copy.open(pickle).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
    }
    // Contains itself.
    assert!(copy.open(b"\x80\x04]\x94h\0a.").is_err());
    // Deep.
    assert!(copy.open(&[&b"\x80\x04"[..], b")", &[0x85; 1 << 20], b"."].concat()).is_err());
}

#[test]
fn files_elsewhere_are_refused() {
    let copy = Copy::of("sharded");
    let name = b"__1_0.distcp";
    let at = copy.metadata.windows(name.len()).position(|window| window == name).unwrap();
    for elsewhere in [b"../../etc/pw", b"/etc/passwd1", b"a/../b.distc", b"C:\\_0.distcp"] {
        let mut metadata = copy.metadata.clone();
        metadata[at..at + name.len()].copy_from_slice(elsewhere);
        let error = copy.open(&metadata).unwrap_err().to_string();
        assert!(error.contains("no file of this folder"), "{error}");
    }
}

static METADATA: LazyLock<Vec<u8>> = LazyLock::new(|| fs::read(beside("golden/plain/.metadata")).unwrap());

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn random_pickles_never_panic(
        codes in prop::collection::vec(prop::sample::select(&b"\x80\x95N\x88\x89JKM\x8aGX\x8cCB()]}t\x85\x86\x87aesuc\x93R\x81bQ\x94qrhj.\0\x01\n"[..]), 0..60)
    ) {
        let copy = Copy::of("sharded");
        prop_assert!(copy.open(&codes).is_err());
    }

    #[test]
    fn mutated_metadata_never_panics(
        mutations in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(), from in any::<prop::sample::Index>(), length in 0_usize..40
    ) {
        let mut bytes = METADATA.clone();
        for (index, byte) in mutations {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        // A piece of it moves elsewhere.
        let (from, to) = (from.index(bytes.len()), cut.index(bytes.len()));
        let piece = bytes[from..bytes.len().min(from + length)].to_vec();
        bytes.splice(to..to, piece);
        let copy = Copy::of("plain");
        if let Ok(folder) = copy.open(&bytes) {
            let _ = read_all(&folder);
        }
    }
}
