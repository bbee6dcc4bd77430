//! Whatever a file holds, there is one clear error.

use std::io::Write;
use std::path::Path;

use ferrotitan_data::{
    BuildOptions, ByteTokenizer, CargoRegistry, Dataset, DatasetOptions, Error, Files, Result, Source, Split, Tokenizer,
};
use proptest::prelude::*;

use crate::support::{build, build_with, files, folder, store_of};

/// What is said of a file with this content.
fn said(name: &str, bytes: &[u8]) -> String {
    let folder = folder();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let error = build(&files(&[path]), &folder.path().join("cache")).unwrap_err();
    error.to_string().replace(&format!("{}/", folder.path().display()), "")
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn files_that_are_not_there() {
    let folder = folder();
    let at = |name: &str| build(&files(&[folder.path().join(name)]), folder.path()).unwrap_err();
    assert!(matches!(at("missing.txt"), Error::NotFound { .. }));
    assert!(matches!(at("*.txt"), Error::NoMatch { .. }));
    assert!(matches!(at("missing/*.txt"), Error::NoMatch { .. }));
    assert!(matches!(at("a{b"), Error::Pattern { .. }));
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    assert!(matches!(at("empty"), Error::NoMatch { .. }));
    let nothing = Source::Files(Files::new(Vec::<String>::new()));
    assert!(matches!(build(&nothing, folder.path()), Err(Error::Empty { items: 0, .. })));
    assert_eq!(at("x/y.txt").to_string(), format!("{}/x/y.txt does not exist", folder.path().display()));
}

#[test]
fn texts_that_are_none() {
    let empty = "the corpus is empty: 1 files or packages were read and hold no text (0 files skipped)";
    assert_eq!(said("a.txt", b""), empty);
    assert_eq!(said("a.jsonl", b"\n\n"), empty);
    assert_eq!(said("a.jsonl", b"{\"text\": \"\"}\n{\"text\": null}"), empty);
    assert_eq!(said("a.txt.gz", &gzip(b"")), empty);
    assert_eq!(
        said("a.txt", b"abc\xff"),
        "a.txt: byte 3 is not UTF-8; convert the file, or narrow the pattern to text files"
    );
}

#[test]
fn lines_that_are_no_records() {
    let fields = said("a.jsonl", b"{\"text\": \"x\"}\n{\"content\": \"x\", \"id\": 3}\n");
    assert_eq!(fields, r#"a.jsonl:2: no text field "text", but ["content", "id"]; set the text field to one of these"#);
    assert_eq!(said("a.jsonl", b"{\"text\": [1]}"), r#"a.jsonl:1: the field "text" is an array, not a string"#);
    let cut = said("a.jsonl", b"{\"text\": \"x\"}\n\n{\"text\": \"y");
    assert_eq!(cut, "a.jsonl:3: not a JSON object: EOF while parsing a string at column 11");
    assert!(said("a.jsonl", b"plain text\n").starts_with("a.jsonl:1: not a JSON object: "));
    assert!(said("a.jsonl", b"{\"text\": \"\xff\"}").starts_with("a.jsonl:1: not a JSON object: "));
    let long = said("a.jsonl.gz", &gzip(&vec![b'x'; (64 << 20) + 1]));
    assert!(long.starts_with("a.jsonl.gz:1: the line is longer than 67108864 bytes"), "{long}");
}

/// The first of several errors is reported, however the work was divided.
#[test]
fn the_first_error_counts() {
    let folder = folder();
    let mut lines = "{\"text\": \"x\"}\n".repeat(5000);
    lines.push_str("broken\n");
    lines.push_str(&"{\"text\": \"x\"}\nalso broken\n".repeat(100));
    std::fs::write(folder.path().join("a.jsonl"), &lines).unwrap();
    std::fs::write(folder.path().join("b.jsonl.gz"), b"not gzip").unwrap();
    for _ in 0..3 {
        let error = build(&files(&[folder.path().join("*.jsonl*")]), &folder.path().join("cache")).unwrap_err();
        assert!(matches!(error, Error::Json { line: 5001, .. }), "{error}");
    }
}

#[test]
fn compressed_files_that_are_corrupt() {
    let text = "some text that compresses, some text that compresses\n".repeat(100);
    let whole = gzip(text.as_bytes());
    let mut flipped = whole.clone();
    let end = flipped.len() - 6;
    flipped[end] ^= 1;
    for (what, bytes) in [
        ("cut off", &whole[..whole.len() / 2]),
        ("other bytes", b"hello, this is text"),
        ("checksum", &flipped),
        ("empty", b""),
    ] {
        let said = said("a.txt.gz", bytes);
        assert!(said.starts_with("a.txt.gz is corrupt gzip: ") || what == "empty", "{what}: {said}");
    }
    let whole = zstd::encode_all(text.as_bytes(), 3).unwrap();
    for (what, bytes) in [("cut off", &whole[..whole.len() / 2]), ("other bytes", b"hello, this is text")] {
        let said = said("a.jsonl.zst", bytes);
        assert!(said.starts_with("a.jsonl.zst is corrupt zstd: "), "{what}: {said}");
    }
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_files_that_are_corrupt() {
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::writer::SerializedFileWriter;

    let schema = "message m { required binary body (UTF8); required group meta { required int64 id; } }";
    let schema = Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = (0..100).map(|number| ByteArray::from(format!("row {number}").as_str())).collect();
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<parquet::data_type::Int64Type>().write_batch(&[3; 100], None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();

    let folder = folder();
    let path = folder.path().join("a.parquet");
    let read = |bytes: &[u8], text_field: &str| {
        std::fs::write(&path, bytes).unwrap();
        let cache = tempfile::tempdir().unwrap();
        let source = Files { text_field: text_field.to_owned(), ..Files::new([path.display().to_string()]) };
        build(&Source::Files(source), cache.path())
    };
    assert_eq!(read(&bytes, "body").unwrap().documents(), 100);
    let error = read(&bytes, "text").unwrap_err();
    assert!(matches!(&error, Error::MissingField { found, .. } if found == &["body", "meta.id"]), "{error}");
    let error = read(&bytes, "meta.id").unwrap_err();
    assert!(matches!(error, Error::FieldType { .. }), "{error}");
    for corrupt in [&b""[..], b"PAR1", &bytes[..bytes.len() / 2], &bytes[4..], b"PAR1\xff\xff\xff\xffPAR1"] {
        let error = read(corrupt, "body").unwrap_err();
        assert!(matches!(error, Error::Corrupt { format: "Parquet", .. }), "{error}");
    }
    // Every byte in turn: an error or other text, never a panic.
    for at in 0..bytes.len() {
        let mut corrupt = bytes.clone();
        corrupt[at] ^= 0xa5;
        let _ = read(&corrupt, "body");
    }
    let error = build(&files(&[folder.path().join("a.parquet.gz")]), folder.path()).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }));
    std::fs::write(folder.path().join("a.parquet.gz"), &bytes).unwrap();
    let error = build(&files(&[folder.path().join("a.parquet.gz")]), folder.path()).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_needs_its_feature() {
    assert_eq!(said("a.parquet", b"PAR1"), "a.parquet needs the feature `parquet` of ferrotitan-data");
}

#[test]
fn addresses() {
    let folder = folder();
    let error = |address: &str| build(&Source::Files(Files::new([address])), folder.path()).unwrap_err();
    if cfg!(feature = "object-store") {
        assert!(matches!(error("s3://bucket/x"), Error::FeatureOff { feature: "s3", .. }) || cfg!(feature = "s3"));
        assert!(matches!(error("nonsense://x/y"), Error::Pattern { .. }));
        assert!(matches!(error("://x"), Error::Pattern { .. }));
        let missing = format!("file://{}/missing", folder.path().display());
        assert!(matches!(error(&missing), Error::NotFound { .. }));
        assert!(matches!(error(&format!("{missing}/*.txt")), Error::NoMatch { .. }));
        assert!(matches!(error(&format!("{missing}/")), Error::NotFound { .. }));
    } else {
        assert!(matches!(error("s3://bucket/x"), Error::FeatureOff { feature: "object-store", .. }));
    }
}

#[test]
fn lockfiles() {
    let folder = folder();
    let path = folder.path().join("Cargo.lock");
    let list = || {
        let registry = CargoRegistry { cargo_home: Some(folder.path().to_owned()), ..CargoRegistry::new(&path) };
        build(&Source::CargoRegistry(registry), folder.path())
    };
    assert!(matches!(list(), Err(Error::NotFound { .. })));
    for bad in ["not toml [", "package = 3", "[[package]]\nname = \"x\"\n"] {
        std::fs::write(&path, bad).unwrap();
        assert!(matches!(list(), Err(Error::Lockfile { .. })), "{bad}");
    }
    let escape = "[[package]]\nname = \"../../etc\"\nversion = \"1\"\nsource = \"registry+x\"\n";
    std::fs::write(&path, escape).unwrap();
    assert!(matches!(list(), Err(Error::Lockfile { .. })));
    std::fs::write(&path, "version = 4\n").unwrap();
    assert!(matches!(list(), Err(Error::Empty { .. })));
}

#[test]
fn corpora_and_options_that_make_no_sequence() {
    let (_folder, store) = store_of(&["short".to_owned()]);
    let new = |options| Dataset::new(store.clone(), options).map(|dataset| dataset.len());
    assert_eq!(new(DatasetOptions::new(6, 0)).unwrap(), 1);
    assert_eq!(
        new(DatasetOptions::new(7, 0)).unwrap_err().to_string(),
        "the train split has 7 tokens in 1 documents, but one sequence needs 8; add text, lower seq_len or change the \
         held-out fraction"
    );
    assert!(matches!(new(DatasetOptions::new(usize::MAX, 0)), Err(Error::TooSmall { .. })));
    assert!(matches!(new(DatasetOptions::new(0, 0)), Err(Error::Option { option: "seq_len", .. })));
    for held_out in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
        let options = DatasetOptions { held_out, ..DatasetOptions::new(4, 0) };
        assert!(matches!(new(options), Err(Error::Option { option: "held_out", .. })), "{held_out}");
    }
    let options = DatasetOptions { split: Split::Validation, ..DatasetOptions::new(4, 0) };
    assert!(matches!(new(options), Err(Error::TooSmall { split: "validation", documents: 0, .. })));
}

/// A tokenizer that breaks its promise.
struct Lying;

impl Tokenizer for Lying {
    fn encode(&self, _: &str) -> Result<Vec<u32>> {
        Ok(vec![10])
    }
    fn decode(&self, _: &[u32]) -> Result<String> {
        Ok(String::new())
    }
    fn vocab_size(&self) -> usize {
        10
    }
    fn bos(&self) -> Option<u32> {
        None
    }
    fn eos(&self) -> Option<u32> {
        None
    }
    fn identity(&self) -> String {
        "lying".to_owned()
    }
}

#[test]
fn a_token_beyond_the_vocabulary_stops_the_build() {
    let folder = folder();
    std::fs::write(folder.path().join("a.txt"), "x").unwrap();
    let source = files(&[folder.path().join("a.txt")]);
    let error = build_with(&source, &Lying, folder.path(), BuildOptions::default()).unwrap_err();
    assert!(error.to_string().contains("it made token 10, but says that its vocabulary has 10"), "{error}");
    assert!(matches!(ByteTokenizer.decode(&[258]), Err(Error::Tokenizer { .. })));
}

fn any_file(name: &str, bytes: &[u8], folder: &Path) -> Result<u64> {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    build(&files(&[path]), &folder.join("cache")).map(|store| store.documents())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0_usize..6) {
        let folder = folder();
        let name = ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.zst", "a.parquet", "Cargo.lock"][kind];
        let valid = std::str::from_utf8(&bytes).is_ok_and(|text| !text.is_empty());
        let result = any_file(name, &bytes, folder.path());
        if kind == 0 {
            prop_assert_eq!(result.is_ok(), valid);
        }
    }

    #[test]
    fn bytes_round_trip(text in "(?s).{0,200}") {
        let tokens = ByteTokenizer.encode(&text).unwrap();
        prop_assert_eq!(tokens.len(), text.len());
        prop_assert_eq!(ByteTokenizer.decode(&tokens).unwrap(), text.clone());
        let framed = [vec![256], tokens, vec![257]].concat();
        prop_assert_eq!(ByteTokenizer.decode(&framed).unwrap(), text);
    }
}
