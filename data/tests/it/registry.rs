//! The packages of a lockfile, in a Cargo registry made for the test.

use std::path::Path;

use ferrotitan_data::{BuildOptions, ByteTokenizer, CargoRegistry, Error, Source, TokenStore, Tokenizer};

use crate::support::{build, build_with, documents, folder};

const LOCKFILE: &str = r#"
version = 4

[[package]]
name = "zeta"
version = "0.1.0"
source = "registry+https://github.com/rust-lang/crates.io-index"
checksum = "aa"

[[package]]
name = "ours"
version = "0.1.0"
dependencies = ["zeta"]

[[package]]
name = "alpha"
version = "2.0.0+meta"
source = "sparse+https://index.crates.io/"
checksum = "bb"

[[package]]
name = "from-git"
version = "1.0.0"
source = "git+https://example.com/x#abc"
"#;

fn write(root: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    let path = root.join("registry/src").join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

fn source(root: &Path) -> Source {
    std::fs::write(root.join("Cargo.lock"), LOCKFILE).unwrap();
    let lockfile = root.join("Cargo.lock");
    Source::CargoRegistry(CargoRegistry { cargo_home: Some(root.to_owned()), ..CargoRegistry::new(lockfile) })
}

fn texts(store: &TokenStore) -> Vec<String> {
    documents(store).iter().map(|tokens| ByteTokenizer.decode(tokens).unwrap()).collect()
}

fn fill(root: &Path) {
    // Written in another order than they are read in, and in two indexes.
    write(root, "index-b/zeta-0.1.0/src/lib.rs", "zeta lib");
    write(root, "index-b/zeta-0.1.0/README.md", "zeta readme");
    write(root, "index-b/zeta-0.1.0/src/a/deep.rs", "zeta deep");
    write(root, "index-b/zeta-0.1.0/Cargo.toml", "not taken");
    write(root, "index-b/zeta-0.1.0/src/latin.rs", b"caf\xe9");
    write(root, "index-b/zeta-0.1.0/src/huge.rs", "x".repeat((1 << 20) + 1));
    write(root, "index-b/zeta-0.1.0/src/empty.rs", "");
    write(root, "index-b/unlisted-1.0.0/src/lib.rs", "not taken");
    write(root, "index-a/alpha-2.0.0+meta/src/lib.rs", "alpha lib");
}

#[test]
fn packages_come_in_the_order_of_the_lockfile() {
    let root = folder();
    fill(root.path());
    let store = build(&source(root.path()), &root.path().join("cache")).unwrap();
    assert_eq!(texts(&store), ["zeta readme", "zeta deep", "zeta lib", "alpha lib"]);
    assert_eq!(store.skipped(), 2);

    // Another machine: other paths, other times, the same store.
    let other = folder();
    fill(other.path());
    let elsewhere = build(&source(other.path()), &other.path().join("cache")).unwrap();
    assert_eq!(elsewhere.fingerprint(), store.fingerprint());
    assert_eq!(texts(&elsewhere), texts(&store));

    // A store that is built needs the registry no more.
    std::fs::remove_dir_all(root.path().join("registry")).unwrap();
    assert_eq!(build(&source(root.path()), &root.path().join("cache")).unwrap().documents(), 4);

    let budget = BuildOptions { max_bytes: Some(12) };
    let store = build_with(&source(other.path()), &ByteTokenizer, &other.path().join("cache"), budget).unwrap();
    assert_eq!(texts(&store), ["zeta readme", "zeta deep"]);
}

#[test]
fn missing_packages_are_listed_at_once() {
    let root = folder();
    let error = build(&source(root.path()), &root.path().join("cache")).unwrap_err();
    let registry = root.path().join("registry/src").display().to_string();
    assert_eq!(
        error.to_string(),
        format!("2 packages are not in {registry} (run `cargo fetch --locked`): zeta-0.1.0, alpha-2.0.0+meta")
    );
    write(root.path(), "index-a/alpha-2.0.0+meta/src/lib.rs", "alpha lib");
    let error = build(&source(root.path()), &root.path().join("cache")).unwrap_err();
    assert!(matches!(&error, Error::MissingPackages { names, .. } if names == &["zeta-0.1.0"]), "{error}");
}

#[test]
fn extensions_can_be_chosen() {
    let root = folder();
    fill(root.path());
    let Source::CargoRegistry(registry) = source(root.path()) else { unreachable!() };
    let toml = Source::CargoRegistry(CargoRegistry { extensions: vec!["toml".to_owned()], ..registry });
    assert_eq!(texts(&build(&toml, &root.path().join("cache")).unwrap()), ["not taken"]);
}
