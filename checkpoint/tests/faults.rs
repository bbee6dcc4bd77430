//! Whatever happens at any write or to any byte: no step that was there is lost, none is loaded that is not what was
//! saved, and the error names the thing.

#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

mod faulty;
mod shards;

use std::sync::Arc;
use std::time::Duration;

use faulty::{Fault, Faulty};
use ferrotitan_checkpoint::comm::{BoxError, DeviceMesh, threads};
use ferrotitan_checkpoint::mesh::{Degrees, Layout, Mesh, Parts, View};
use ferrotitan_checkpoint::{
    Checkpoint, Dtype, Error, LoadOptions, Mode, Result, SaveOptions, Saver, Stats, Store, Which, load, steps,
};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use shards::Global;

const TWO: Degrees = Degrees { pp: 1, dp_replicate: 1, dp_shard: 2, cp: 1, tp: 1 };

/// How long a hung request or a missing rank is waited for where there is one.
const SHORT: Duration = Duration::from_millis(150);

/// What is saved: tensors of several files a rank, as they are in one step.
fn model(step: u64, large: bool) -> Vec<Global> {
    let mut model = vec![
        Global::new("embedding", Dtype::Bf16, &[40, 8], step),
        Global::new("norm", Dtype::F32, &[], step + 100),
        Global::new("head", Dtype::F32, &[10, 12], step + 200),
    ];
    if large {
        // More than one request holds, all of it on rank 0.
        model.push(Global::new("large", Dtype::U8, &[1, 9 << 20], step));
    }
    model
}

fn layout(global: &Global) -> Layout {
    let whole = Layout::replicated(&global.shape);
    if global.shape.is_empty() { whole } else { whole.shard(View::DP_SHARD, 0, Parts::Even).unwrap() }
}

/// What each rank had of a save of `step`, each with a way to the store of its own.
fn save(
    ways: &[Arc<dyn ObjectStore>],
    step: u64,
    large: bool,
    options: &SaveOptions,
    wait: Duration,
) -> Vec<Result<()>> {
    let model = model(step, large);
    let body = |mesh: DeviceMesh| -> Result<_, BoxError> {
        let store = Store::from_object_store(ways[mesh.rank()].clone(), "run")?.with_timeout(wait);
        let mut saver = Saver::new(store, mesh.clone(), options.clone());
        let items: Vec<_> = model.iter().map(|global| global.item(&layout(global), &mesh)).collect();
        let begun = saver.save(step, items, serde_json::json!({ "step": step }));
        let done = begun.and_then(|_| saver.finish());
        Ok(done.map(|_: Option<Stats>| ()))
    };
    let patient = threads::Options { timeout: Duration::from_secs(60), ..threads::Options::default() };
    threads::run(TWO, &patient, body).unwrap()
}

fn clean_save(store: &Arc<InMemory>, step: u64, large: bool, options: &SaveOptions) -> Vec<Result<()>> {
    let ways = [store.clone() as Arc<dyn ObjectStore>, store.clone()];
    save(&ways, step, large, options, Store::TIMEOUT)
}

fn open(store: &Arc<InMemory>, which: Which) -> Result<Checkpoint> {
    Checkpoint::open(&Store::from_object_store(store.clone(), "run")?, which)
}

/// Whether the step is there, and is what was saved.
fn is_whole(checkpoint: &Checkpoint, large: bool) -> Result<bool> {
    checkpoint.verify(|_| ())?;
    let mut same = checkpoint.state()["step"] == checkpoint.step();
    for global in model(checkpoint.step(), large) {
        same &= global.is_in(checkpoint)?;
    }
    Ok(same)
}

fn options(mode: Mode, large: bool) -> SaveOptions {
    let file_bytes = if large { 16 << 20 } else { 200 };
    SaveOptions { mode, file_bytes, patience: SHORT, ..SaveOptions::default() }
}

/// The byte boundaries of an object at which a write may end.
fn boundaries(path: &str, bytes: usize) -> Vec<usize> {
    let mut at = match path.ends_with(".safetensors") {
        // In the length, after it, in the header, and among the tensors.
        true => vec![0, 1, 8, 40, bytes - 60, bytes - 1],
        false => vec![0, 1, bytes / 2, bytes - 2, bytes - 1],
    };
    at.retain(|&at| at < bytes);
    at.dedup();
    at
}

/// Saves step 2 where step 1 is there, with one fault on the way of one rank.
fn save_with(fault: Fault, write: usize, path: &str, rank: usize, large: bool, options: &SaveOptions) {
    let told = format!("{fault:?} at write {write} ({path}) of rank {rank}, {:?}", options.mode);
    let inner = Arc::new(InMemory::new());
    let patient = SaveOptions { patience: Duration::from_secs(60), ..options.clone() };
    clean_save(&inner, 1, large, &patient).into_iter().for_each(|done| done.unwrap());

    let way = |of: usize| Faulty::new(inner.clone(), (of == rank).then_some((write, fault)));
    let ways = [0, 1].map(|rank| Arc::new(way(rank)) as Arc<dyn ObjectStore>);
    let wait = if fault == Fault::Hang { SHORT } else { Duration::from_secs(60) };
    // Of all faults, these leave rank 1 no way to tell rank 0.
    let silent = rank == 1 && matches!(fault, Fault::Kill | Fault::Torn(_) | Fault::Full);
    let results = save(&ways, 2, large, if silent { options } else { &patient }, wait);

    // Step 1 is untouched, and step 2 is there as a whole or not at all.
    assert!(is_whole(&open(&inner, Which::Step(1)).expect(&told), large).expect(&told), "{told}");
    let latest = open(&inner, Which::Latest);
    let name = path.rsplit('/').next().unwrap();
    match (&latest, results.iter().all(Result::is_ok)) {
        (Ok(latest), ok) => match is_whole(latest, large) {
            Ok(whole) => assert!(whole && (latest.step() == 2 || !ok), "{told}: {results:?}"),
            Err(found) => {
                assert!(matches!(fault, Fault::Flip(_)) && latest.step() == 2, "{told}: {found}");
                assert!(found.to_string().contains(name), "{told}: {found}");
            }
        },
        (Err(found), _) => {
            assert!(
                matches!(fault, Fault::Flip(_)) && found.to_string().contains("step-2/manifest.json"),
                "{told}: {found}"
            );
        }
    }
    // All ranks agree, and each names the object or the rank.
    let failed = results.iter().filter(|done| done.is_err()).count();
    assert!(failed == 0 || failed == 2, "{told}: {results:?}");
    for error in results.iter().filter_map(|done| done.as_ref().err()) {
        assert!(matches!(error, Error::NotSaved { step: 2, .. }), "{told}: {error}");
        let words = error.to_string();
        assert!(words.contains(name) || words.contains(&format!("rank {rank}")), "{told}: {words}");
    }
    // The same step can be saved anew, unless it is there.
    let again = clean_save(&inner, 2, large, &patient);
    let exists = latest.map_or(true, |latest| latest.step() == 2);
    if exists {
        assert!(matches!(&again[0], Err(Error::StepExists { step: 2, .. })), "{told}: {again:?}");
    } else {
        again.into_iter().for_each(|done| done.expect(&told));
        assert!(is_whole(&open(&inner, Which::Latest).unwrap(), large).expect(&told), "{told}");
        // What the first attempt left is gone.
        let store = Store::from_object_store(inner.clone(), "run/step-2").unwrap();
        assert_eq!(store.folders("").unwrap().len(), 1, "{told}");
    }
}

#[test]
fn faults_of_a_save() {
    let mut faults = 0;
    for (mode, large) in [(Mode::Sync, false), (Mode::Async, false), (Mode::Sync, true)] {
        let options = options(mode, large);
        let patient = SaveOptions { patience: Duration::from_secs(60), ..options.clone() };
        let inner = Arc::new(InMemory::new());
        clean_save(&inner, 1, large, &patient).into_iter().for_each(|done| done.unwrap());
        let watched = [0, 1].map(|_| Faulty::new(inner.clone(), None));
        let ways = watched.clone().map(|way| Arc::new(way) as Arc<dyn ObjectStore>);
        save(&ways, 2, large, &patient, Store::TIMEOUT).into_iter().for_each(|done| done.unwrap());
        let ranks = if large { 1 } else { 2 };
        for (rank, way) in watched.iter().enumerate().take(ranks) {
            for (write, (path, bytes)) in way.log().into_iter().enumerate() {
                let mut kinds = vec![Fault::Error, Fault::Hang, Fault::Lost, Fault::Kill, Fault::Torn(bytes / 2)];
                if mode == Mode::Sync && !large {
                    kinds.push(Fault::Full);
                    kinds.extend(boundaries(&path, bytes).into_iter().map(Fault::Torn));
                    kinds.extend([9, bytes / 2, bytes - 30].map(Fault::Flip));
                }
                for fault in kinds {
                    // The attempt has another name each time; what matters is the file.
                    save_with(fault, write, &path, rank, large, &options);
                    faults += 1;
                }
            }
        }
    }
    println!("{faults} faults of a save");
    assert!(faults >= 200, "{faults}");
}

/// Changes one object of step 2, tries to load it on two ranks, and gives what each says.
fn load_damaged(damage: &dyn Fn(&mut Vec<u8>) -> bool, path: &Path, inner: &InMemory) -> Vec<Result<bool>> {
    let copy = Arc::new(inner.fork());
    let block = |bytes: Vec<u8>, keep: bool| {
        futures::executor::block_on(async {
            if keep { copy.put(path, bytes.into()).await.map(drop) } else { copy.delete(path).await }
        })
    };
    let mut bytes = futures::executor::block_on(async { inner.get(path).await?.bytes().await }).unwrap().to_vec();
    let keep = damage(&mut bytes);
    block(bytes, keep).unwrap();
    let model = model(2, false);
    let loaded = threads::run(TWO, &threads::Options::default(), |mesh| -> Result<_, BoxError> {
        let items: Vec<_> = model.iter().map(|global| global.blank(&layout(global), &mesh)).collect();
        let given = items.iter().map(|item| ferrotitan_checkpoint::Item {
            name: item.name.clone(),
            layout: item.layout.clone(),
            tensor: item.tensor.shallow_clone(),
        });
        let done = open(&copy, Which::Step(2))
            .and_then(|found| load(&found, given.collect::<Vec<_>>(), &mesh, &LoadOptions::default()).map(drop));
        Ok(done.map(|()| model.iter().zip(&items).all(|(global, item)| global.matches(item, &mesh))))
    });
    // The step before is there whatever happens.
    assert!(is_whole(&open(&copy, Which::Step(1)).unwrap(), false).unwrap());
    loaded.unwrap()
}

#[test]
fn faults_of_a_load() {
    let inner = Arc::new(InMemory::new());
    for step in [1, 2] {
        let options = SaveOptions { patience: Duration::from_secs(60), ..options(Mode::Sync, false) };
        clean_save(&inner, step, false, &options).into_iter().for_each(|done| done.unwrap());
    }
    let listed = Store::from_object_store(inner.clone(), "run/step-2").unwrap().list("").unwrap();
    let mut faults = 0;
    for (path, bytes) in listed.iter().filter(|(path, _)| !path.contains("/rank-00001.json")) {
        let (location, bytes) = (Path::from(format!("run/step-2/{path}")), *bytes as usize);
        let is_manifest = path == "manifest.json";
        let mut check = |what: String, damage: &dyn Fn(&mut Vec<u8>) -> bool| {
            faults += 1;
            for done in load_damaged(damage, &location, &inner) {
                match done {
                    Ok(same) => assert!(same && !is_manifest, "{what} of {path}"),
                    // The ranks that read another file are told which rank it was.
                    Err(error) => {
                        let words = error.to_string();
                        // A manifest that is gone, or was cut, is a step that is not there.
                        let no_step = is_manifest && matches!(error, Error::NoStep { .. });
                        assert!(words.contains(path.as_str()) || no_step, "{what} of {path}: {words}");
                    }
                }
            }
        };
        check("loss".to_owned(), &|_| false);
        let cuts = boundaries(path, bytes);
        for cut in cuts {
            check(format!("a cut at {cut}"), &|bytes| {
                bytes.truncate(cut);
                true
            });
        }
        // Every bit of a byte, at many bytes of the manifest and the header, and all over the tensors.
        for at in (0..bytes).step_by((bytes / 24).max(1)).chain([bytes - 1]) {
            check(format!("a flipped bit of byte {at}"), &|bytes| {
                bytes[at] ^= 1 << (at % 8);
                true
            });
        }
        check("foreign content".to_owned(), &|bytes| {
            bytes.fill(b'{');
            true
        });
    }
    println!("{faults} faults of a load");
    assert!(faults >= 200, "{faults}");
}

#[test]
fn verify_finds_every_flipped_bit() {
    let inner = Arc::new(InMemory::new());
    clean_save(&inner, 2, false, &SaveOptions { file_bytes: 300, ..SaveOptions::default() });
    let store = Store::from_object_store(inner.clone(), "run/step-2").unwrap();
    for (path, bytes) in store.list("").unwrap().into_iter().filter(|(path, _)| path.ends_with(".safetensors")) {
        for at in (0..bytes as usize).step_by(5) {
            let whole = store.get(&path, bytes).unwrap();
            let mut damaged = whole.to_vec();
            damaged[at] ^= 32;
            store.put(&path, damaged.into()).unwrap();
            let found = open(&inner, Which::Latest).unwrap().verify(|_| ()).expect_err("a bit is other").to_string();
            assert!(found.contains(&path), "{found}");
            store.put(&path, whole).unwrap();
        }
    }
    assert!(is_whole(&open(&inner, Which::Latest).unwrap(), false).unwrap());
}

/// Whatever fails while old steps are deleted, the one just saved is there, and no step is there in part.
#[test]
fn faults_of_deletion() {
    let options = SaveOptions { keep_latest_k: 2, patience: Duration::from_secs(60), ..options(Mode::Sync, false) };
    for fault in [Fault::Error, Fault::Kill, Fault::Hang] {
        for write in 0..14 {
            let inner = Arc::new(InMemory::new());
            for step in 1..=3 {
                let keep_all = SaveOptions { keep_latest_k: 0, ..options.clone() };
                clean_save(&inner, step, false, &keep_all).into_iter().for_each(|done| done.unwrap());
            }
            let ways = [
                Arc::new(Faulty::new(inner.clone(), Some((write, fault)))) as Arc<dyn ObjectStore>,
                inner.clone() as Arc<dyn ObjectStore>,
            ];
            let saved = save(&ways, 4, false, &options, SHORT).iter().all(Result::is_ok);
            let store = Store::from_object_store(inner.clone(), "run").unwrap();
            let found = steps(&store).unwrap();
            assert!(found.contains(&3) && (!saved || found.contains(&4)), "{fault:?} at {write}: {found:?}");
            for step in found {
                assert!(is_whole(&open(&inner, Which::Step(step)).unwrap(), false).unwrap(), "{fault:?} at {write}");
            }
            // The next save does what was left undone.
            clean_save(&inner, 5, false, &options).into_iter().for_each(|done| done.unwrap());
            let kept = if saved { vec![4, 5] } else { vec![3, 5] };
            assert_eq!(steps(&store).unwrap(), kept, "{fault:?} at {write}");
            assert_eq!(store.folders("").unwrap().len(), 2, "{fault:?} at {write}");
        }
    }
}
