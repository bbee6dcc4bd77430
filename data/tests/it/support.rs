//! Small corpora, and stores of them.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrotitan_data::{BuildOptions, ByteTokenizer, Files, Progress, Result, Source, TokenStore, Tokenizer};
use proptest::prelude::*;
use tempfile::TempDir;

/// Documents with text in several scripts.
pub(crate) fn texts(count: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec("(?s).{1,40}", count)
}

/// A folder that disappears with the test.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// Writes documents as JSONL.
pub(crate) fn write_jsonl(path: &Path, texts: &[String]) {
    let lines: Vec<String> = texts.iter().map(|text| serde_json::json!({"id": 1, "text": text}).to_string()).collect();
    std::fs::write(path, lines.join("\n")).unwrap();
}

pub(crate) fn files(patterns: &[PathBuf]) -> Source {
    Source::Files(Files::new(patterns.iter().map(|path| path.display().to_string())))
}

/// Builds a store without waiting for anything.
pub(crate) fn build(source: &Source, cache: &Path) -> Result<TokenStore> {
    build_with(source, &ByteTokenizer, cache, BuildOptions::default())
}

pub(crate) fn build_with(
    source: &Source,
    tokenizer: &dyn Tokenizer,
    cache: &Path,
    options: BuildOptions,
) -> Result<TokenStore> {
    TokenStore::open_or_build(source, tokenizer, cache, options, &mut |_: Progress| ControlFlow::Continue(()))
}

/// A store of documents, in a folder of its own.
pub(crate) fn store_of(texts: &[String]) -> (TempDir, Arc<TokenStore>) {
    let folder = folder();
    let path = folder.path().join("corpus.jsonl");
    write_jsonl(&path, texts);
    let store = build(&files(&[path]), &folder.path().join("cache")).unwrap();
    (folder, Arc::new(store))
}

/// All documents of a store.
pub(crate) fn documents(store: &TokenStore) -> Vec<Vec<u32>> {
    let read = |document| {
        let mut tokens = Vec::new();
        store.read(store.document(document).unwrap(), &mut tokens).unwrap();
        tokens
    };
    (0..store.documents()).map(read).collect()
}

/// What the byte tokenizer makes of documents.
pub(crate) fn byte_documents<T: AsRef<str>>(texts: &[T]) -> Vec<Vec<u32>> {
    let bytes = |text: &T| text.as_ref().bytes().map(u32::from).collect::<Vec<_>>();
    texts.iter().map(|text| [vec![256], bytes(text), vec![257]].concat()).collect()
}
