//! The same documents from every format and place make the same store.

use std::io::Write;
use std::path::Path;

use ferrotitan_data::{BuildOptions, ByteTokenizer, Files, Format, Source, TokenStore, Tokenizer};
use proptest::prelude::*;

use crate::support::{build, build_with, byte_documents, documents, files, folder, write_jsonl};

fn gzip(path: &Path, bytes: &[u8]) {
    // Two members, as `cat a.gz b.gz` makes them.
    let mut out = Vec::new();
    let (head, tail) = bytes.split_at(bytes.len() / 2);
    for part in [head, tail] {
        let mut encoder = flate2::write::GzEncoder::new(&mut out, flate2::Compression::default());
        encoder.write_all(part).unwrap();
        encoder.finish().unwrap();
    }
    std::fs::write(path, out).unwrap();
}

fn zst(path: &Path, bytes: &[u8]) {
    let (head, tail) = bytes.split_at(bytes.len() / 2);
    let frames = [zstd::encode_all(head, 3).unwrap(), zstd::encode_all(tail, 3).unwrap()];
    std::fs::write(path, frames.concat()).unwrap();
}

/// Documents with line breaks, escapes, and one that is cut into pieces.
fn corpus() -> Vec<String> {
    let mut texts: Vec<String> =
        (0..30).map(|number| format!("Dokument {number}:\n\t\"größer\" \\ 漢字 🦀\r\n")).collect();
    texts[7] = "a line of a long document, and a wörd\n".repeat(60_000);
    texts
}

#[cfg(feature = "parquet")]
fn write_parquet(path: &Path, texts: &[Option<String>], compression: parquet::basic::Compression) {
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;

    let schema = "message corpus { required int64 id; optional binary text (UTF8); }";
    let schema = Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for rows in texts.chunks(11) {
        let mut group = writer.next_row_group().unwrap();
        let ids: Vec<i64> = (0..rows.len() as i64).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let values: Vec<ByteArray> = rows.iter().flatten().map(|text| ByteArray::from(text.as_str())).collect();
        let levels: Vec<i16> = rows.iter().map(|text| i16::from(text.is_some())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

#[test]
fn all_formats_give_the_same_store() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let texts = corpus();
    let mut sources: Vec<(&str, Source)> = Vec::new();

    for kind in ["txt", "txt.gz", "txt.zst"] {
        let inside = at(&format!("plain-{kind}"));
        std::fs::create_dir(&inside).unwrap();
        for (number, text) in texts.iter().enumerate() {
            let path = inside.join(format!("{number:03}.{kind}"));
            match kind {
                "txt" => std::fs::write(&path, text).unwrap(),
                "txt.gz" => gzip(&path, text.as_bytes()),
                _ => zst(&path, text.as_bytes()),
            }
        }
        sources.push(("folder", files(std::slice::from_ref(&inside))));
        sources.push(("glob", files(&[inside.join("*.t[xy]t*")])));
    }
    write_jsonl(&at("a.jsonl"), &texts);
    let lines = std::fs::read(at("a.jsonl")).unwrap();
    gzip(&at("b.jsonl.gz"), &lines);
    zst(&at("c.ndjson.zst"), &lines);
    let with_bom = [b"\xef\xbb\xbf\n\n", &lines[..], b"\n {\"text\": null}\n{\"text\": \"\"}\n\n"].concat();
    std::fs::write(at("d.json"), with_bom).unwrap();
    let forced = Files { format: Some(Format::Jsonl), ..Files::new([at("d.json").display().to_string()]) };
    sources.push(("jsonl", files(&[at("a.jsonl")])));
    sources.push(("jsonl.gz", files(&[at("b.jsonl.gz")])));
    sources.push(("ndjson.zst", files(&[at("c.ndjson.zst")])));
    sources.push(("forced format", Source::Files(forced)));
    #[cfg(feature = "parquet")]
    {
        use parquet::basic::{Compression, ZstdLevel};
        let rows: Vec<Option<String>> = texts.iter().flat_map(|text| [Some(text.clone()), None]).collect();
        let zstd = Compression::ZSTD(ZstdLevel::default());
        for (name, compression) in
            [("p.parquet", Compression::UNCOMPRESSED), ("q.parquet", Compression::SNAPPY), ("r.parquet", zstd)]
        {
            write_parquet(&at(name), &rows, compression);
            sources.push((name, files(&[at(name)])));
        }
    }
    #[cfg(feature = "object-store")]
    {
        let url = |rest: &str| Source::Files(Files::new([format!("file://{}/{rest}", folder.path().display())]));
        sources.push(("file:// object", url("a.jsonl")));
        sources.push(("file:// compressed", url("c.ndjson.zst")));
        sources.push(("file:// folder", url("plain-txt")));
        sources.push(("file:// folder with a slash", url("plain-txt.gz/")));
        sources.push(("file:// glob", url("plain-t?t/*.txt")));
        sources.push(("file:// glob over folders", url("plain-{txt,nothing}/**")));
        #[cfg(feature = "parquet")]
        sources.push(("file:// parquet", url("q.parquet")));
    }

    let expected = byte_documents(&texts);
    let raw = |store: &TokenStore| {
        (std::fs::read(store.folder().join("tokens")).unwrap(), std::fs::read(store.folder().join("index")).unwrap())
    };
    let mut first = None;
    for (name, source) in sources {
        let store = build(&source, &at("cache")).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert_eq!(store.text_bytes(), texts.iter().map(|text| text.len() as u64).sum::<u64>(), "{name}");
        let bytes = raw(&store);
        let (first, first_name) = first.get_or_insert_with(|| {
            assert_eq!(documents(&store), expected);
            (bytes.clone(), name)
        });
        assert!(*first == bytes, "{name} differs from {first_name}");
    }
}

#[test]
fn patterns_are_read_in_order_and_files_once() {
    let folder = folder();
    for name in ["b/2.txt", "b/1.txt", "a.txt", "b/.hidden/3.txt", "b/c/d/4.txt", "[x].txt"] {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, name).unwrap();
    }
    std::os::unix::fs::symlink(folder.path().join("a.txt"), folder.path().join("b/0.txt")).unwrap();
    std::os::unix::fs::symlink(folder.path(), folder.path().join("b/loop")).unwrap();
    let read = |patterns: &[&str]| -> Vec<String> {
        let patterns: Vec<_> = patterns.iter().map(|pattern| folder.path().join(pattern)).collect();
        let store = build(&files(&patterns), &folder.path().join(".cache")).unwrap();
        documents(&store).iter().map(|tokens| ByteTokenizer.decode(tokens).unwrap()).collect()
    };
    assert_eq!(read(&["b"]), ["a.txt", "b/1.txt", "b/2.txt", "b/c/d/4.txt"]);
    assert_eq!(read(&["b/*.txt"]), ["a.txt", "b/1.txt", "b/2.txt"]);
    assert_eq!(read(&["b/2.txt", "a.txt", "b/**/*.txt"]), ["b/2.txt", "a.txt", "a.txt", "b/1.txt", "b/c/d/4.txt"]);
    assert_eq!(read(&["[x].txt"]), ["[x].txt"]);
    assert_eq!(read(&["{a,[[]x]}.txt"]), ["[x].txt", "a.txt"]);
}

#[test]
fn a_byte_budget_keeps_whole_documents() {
    let folder = folder();
    let texts: Vec<String> = (0..100).map(|number| format!("{number:010}")).collect();
    write_jsonl(&folder.path().join("x.jsonl"), &texts);
    let source = files(&[folder.path().join("x.jsonl")]);
    for (max_bytes, count) in [(0, 1), (1, 1), (10, 1), (11, 2), (500, 50), (995, 100), (1000, 100), (5000, 100)] {
        let options = BuildOptions { max_bytes: Some(max_bytes) };
        let store = build_with(&source, &ByteTokenizer, folder.path(), options).unwrap();
        assert_eq!(documents(&store), byte_documents(&texts[..count]), "{max_bytes}");
    }
}

/// More text than one batch of all cores holds, in the order that it was written in.
#[test]
fn long_corpora_keep_their_order() {
    let folder = folder();
    let texts: Vec<String> = (0..3000).map(|number| format!("{number} ").repeat(1 + number % 3000)).collect();
    write_jsonl(&folder.path().join("x.jsonl"), &texts);
    let mut calls = 0;
    let store = TokenStore::open_or_build(
        &files(&[folder.path().join("x.jsonl")]),
        &ByteTokenizer,
        folder.path(),
        BuildOptions::default(),
        &mut |_| {
            calls += 1;
            std::ops::ControlFlow::Continue(())
        },
    )
    .unwrap();
    assert!(calls >= 1);
    assert!(documents(&store) == byte_documents(&texts));
}

/// A vocabulary that needs four bytes a token.
struct Wide;

impl Tokenizer for Wide {
    fn encode(&self, text: &str) -> ferrotitan_data::Result<Vec<u32>> {
        Ok(text.chars().map(u32::from).collect())
    }
    fn decode(&self, tokens: &[u32]) -> ferrotitan_data::Result<String> {
        Ok(tokens.iter().filter_map(|token| char::from_u32(*token)).collect())
    }
    fn vocab_size(&self) -> usize {
        0x11_0000
    }
    fn bos(&self) -> Option<u32> {
        None
    }
    fn eos(&self) -> Option<u32> {
        None
    }
    fn identity(&self) -> String {
        "characters".to_owned()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn stores_hold_what_was_written(texts in crate::support::texts(1..20)) {
        let folder = folder();
        let path = folder.path().join("x.jsonl");
        write_jsonl(&path, &texts);
        let source = files(&[path]);
        prop_assert_eq!(documents(&build(&source, folder.path()).unwrap()), byte_documents(&texts));
        let wide = build_with(&source, &Wide, folder.path(), BuildOptions::default()).unwrap();
        let decoded: Vec<String> = documents(&wide).iter().map(|tokens| Wide.decode(tokens).unwrap()).collect();
        prop_assert_eq!(decoded, texts);
    }
}
