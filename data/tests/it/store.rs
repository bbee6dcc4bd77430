//! Caching, rebuilding, cancelling, and builders that meet.

use std::fs::OpenOptions;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ferrotitan_data::{BuildOptions, ByteTokenizer, Error, Progress, Result, Source, TokenStore, Tokenizer};

use crate::support::{build, byte_documents, documents, files, folder};

/// Counts how many texts it encodes, so that a test sees whether a store was built or opened.
#[derive(Default)]
struct Counting(AtomicUsize);

impl Tokenizer for Counting {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
        ByteTokenizer.encode(text)
    }
    fn decode(&self, tokens: &[u32]) -> Result<String> {
        ByteTokenizer.decode(tokens)
    }
    fn vocab_size(&self) -> usize {
        258
    }
    fn bos(&self) -> Option<u32> {
        Some(256)
    }
    fn eos(&self) -> Option<u32> {
        Some(257)
    }
    fn identity(&self) -> String {
        "counting".to_owned()
    }
}

fn open(source: &Source, tokenizer: &dyn Tokenizer, cache: &Path) -> Result<TokenStore> {
    TokenStore::open_or_build(source, tokenizer, cache, BuildOptions::default(), &mut |_| ControlFlow::Continue(()))
}

#[test]
fn a_store_is_built_once_and_again_when_its_source_changes() {
    let folder = folder();
    let path = folder.path().join("a.txt");
    std::fs::write(&path, "one").unwrap();
    let source = files(std::slice::from_ref(&path));
    let tokenizer = Counting::default();
    let count = || tokenizer.0.load(Ordering::Relaxed);
    let cache = folder.path().join("deep/cache");

    let first = open(&source, &tokenizer, &cache).unwrap();
    let again = open(&source, &tokenizer, &cache).unwrap();
    assert_eq!((count(), first.fingerprint()), (1, again.fingerprint()));
    assert_eq!(TokenStore::open(first.folder()).unwrap().tokens(), 5);

    std::fs::write(&path, "two, longer").unwrap();
    let changed = open(&source, &tokenizer, &cache).unwrap();
    assert_eq!((count(), changed.tokens()), (2, 13));
    assert_ne!(first.fingerprint(), changed.fingerprint());
    // The old one can still be read.
    assert_eq!(documents(&first), byte_documents(&["one"]));

    // The same size and another time.
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    open(&source, &tokenizer, &cache).unwrap();
    assert_eq!(count(), 3);
    assert_ne!(open(&source, &ByteTokenizer, &cache).unwrap().fingerprint(), changed.fingerprint());
}

#[test]
fn whatever_is_damaged_is_noticed_and_rebuilt() {
    let folder = folder();
    for (name, text) in [("a.txt", "first"), ("b.txt", "second"), ("c.txt", "third")] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let source = files(&[folder.path().join("*.txt")]);
    let cache = folder.path().join("cache");
    let whole = build(&source, &cache).unwrap();
    let at = |name: &str| whole.folder().join(name);
    let overwrite = |name: &str, offset: usize, bytes: &[u8]| {
        let mut content = std::fs::read(at(name)).unwrap();
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
        std::fs::write(at(name), content).unwrap();
    };
    let cut = |name: &str, length: u64| OpenOptions::new().write(true).open(at(name)).unwrap().set_len(length).unwrap();
    let edit = |from: &str, to: &str| {
        let text = std::fs::read_to_string(at("manifest.json")).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(at("manifest.json"), text.replace(from, to)).unwrap();
    };
    let damages: [(&str, &dyn Fn()); 14] = [
        ("no manifest", &|| std::fs::remove_file(at("manifest.json")).unwrap()),
        ("a manifest cut off", &|| cut("manifest.json", 20)),
        ("an empty manifest", &|| cut("manifest.json", 0)),
        ("no tokens", &|| std::fs::remove_file(at("tokens")).unwrap()),
        ("tokens cut off", &|| cut("tokens", 10)),
        ("tokens too long", &|| cut("tokens", 1000)),
        ("no index", &|| std::fs::remove_file(at("index")).unwrap()),
        ("an index cut off", &|| cut("index", 30)),
        ("another magic number", &|| overwrite("index", 0, b"x")),
        ("boundaries that fall", &|| overwrite("index", 24, &1000_u64.to_le_bytes())),
        ("boundaries that stay", &|| overwrite("index", 24, &0_u64.to_le_bytes())),
        ("more documents than there are", &|| edit("\"documents\": 3", "\"documents\": 2305843009213693951")),
        ("more tokens than there are", &|| edit("\"tokens\": 22", "\"tokens\": 9223372036854775808")),
        ("another format", &|| edit("\"format\": 1", "\"format\": 999")),
    ];
    for (what, damage) in damages {
        damage();
        let error = TokenStore::open(whole.folder()).expect_err(what);
        assert!(matches!(error, Error::Store { .. } | Error::Io { .. }), "{what}: {error}");
        let rebuilt = build(&source, &cache).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(rebuilt.folder(), whole.folder(), "{what}");
        assert_eq!(documents(&rebuilt), byte_documents(&["first", "second", "third"]), "{what}");
    }
    // A token that the vocabulary lacks cannot be seen on opening, only on reading.
    overwrite("tokens", 4, &9999_u16.to_le_bytes());
    let store = build(&source, &cache).unwrap();
    let error = store.read(0..7, &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("token 9999 in a vocabulary of 258"), "{error}");
    assert!(matches!(store.read(20..23, &mut Vec::new()), Err(Error::Option { .. })));
    assert_eq!(store.document(3), None);
    assert_eq!(store.document(u64::MAX), None);
}

#[test]
fn an_interrupted_build_leaves_no_store_and_is_taken_up() {
    let folder = folder();
    let text = "some text of a document\n".repeat(1000);
    for number in 0..200 {
        std::fs::write(folder.path().join(format!("{number:03}.txt")), &text).unwrap();
    }
    std::fs::write(folder.path().join("zzz.txt"), b"\xff").unwrap();
    let cache = folder.path().join("cache");
    let files_in = |folder: &Path| -> Vec<String> {
        let stores = std::fs::read_dir(folder).into_iter().flatten();
        let inside = stores.flat_map(|store| std::fs::read_dir(store.unwrap().path()).unwrap());
        let mut names: Vec<_> = inside.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };

    let good = files(&[folder.path().join("0*.txt")]);
    let mut stop = |_| ControlFlow::Break(());
    let result = TokenStore::open_or_build(&good, &ByteTokenizer, &cache, BuildOptions::default(), &mut stop);
    assert!(matches!(result, Err(Error::Cancelled)));
    assert_eq!(files_in(&cache), ["lock"]);
    // What a builder that was killed leaves behind.
    let store = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    std::fs::write(store.join("partial-abc"), "half").unwrap();
    std::fs::write(store.join("tokens"), "old").unwrap();
    assert_eq!(build(&good, &cache).unwrap().documents(), 100);
    assert_eq!(files_in(&cache), ["index", "lock", "manifest.json", "tokens"]);

    // An error at the very end.
    let cache = folder.path().join("other");
    let error = build(&files(&[folder.path().join("*.txt")]), &cache).unwrap_err();
    assert!(matches!(&error, Error::NotUtf8 { path, offset: 0 } if path.ends_with("zzz.txt")), "{error}");
    assert_eq!(files_in(&cache), ["lock"]);
}

#[test]
fn one_builds_and_the_others_wait() {
    let folder = folder();
    for number in 0..8 {
        std::fs::write(folder.path().join(format!("{number}.txt")), "text").unwrap();
    }
    let source = files(&[folder.path().join("*.txt")]);
    let tokenizer = Counting::default();
    let cache = folder.path().join("cache");
    let waited = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut progress = |progress| {
                    if progress == Progress::Waiting {
                        waited.fetch_add(1, Ordering::Relaxed);
                    }
                    ControlFlow::Continue(())
                };
                let options = BuildOptions::default();
                let store = TokenStore::open_or_build(&source, &tokenizer, &cache, options, &mut progress).unwrap();
                assert_eq!(store.documents(), 8);
            });
        }
    });
    assert_eq!(tokenizer.0.load(Ordering::Relaxed), 8);
    assert!(waited.load(Ordering::Relaxed) > 0);
}

#[test]
fn a_read_only_store_opens() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    std::fs::write(folder.path().join("a.txt"), "text").unwrap();
    let source = files(&[folder.path().join("a.txt")]);
    let cache = folder.path().join("cache");
    let store = build(&source, &cache).unwrap();
    let set = |mode| std::fs::set_permissions(store.folder(), std::fs::Permissions::from_mode(mode)).unwrap();
    set(0o555);
    let again = build(&source, &cache);
    set(0o755);
    assert_eq!(again.unwrap().tokens(), 6);
}

#[test]
fn opening_is_fast() {
    let folder = folder();
    let lines = "{\"text\": \"a short document\"}\n".repeat(200_000);
    std::fs::write(folder.path().join("a.jsonl"), lines).unwrap();
    let source = files(&[folder.path().join("a.jsonl")]);
    build(&source, folder.path()).unwrap();
    let start = Instant::now();
    assert_eq!(build(&source, folder.path()).unwrap().documents(), 200_000);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}
