//! Where text comes from, and the list of items that a source stands for.

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::read::Location;

mod cargo_registry;
mod local;
#[cfg(feature = "object-store")]
pub(crate) mod objects;

pub(crate) use cargo_registry::Package;

/// Where text comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// Files, by path, folder, glob or address.
    Files(Files),
    /// The packages that a `Cargo.lock` lists, in the local Cargo registry.
    CargoRegistry(CargoRegistry),
}

/// Files of text, on this machine or in an object store.
///
/// | name ends in | documents |
/// |---|---|
/// | `.jsonl`, `.ndjson` | the text field of each line |
/// | `.parquet` | each row of the text column (feature `parquet`) |
/// | anything else | the file is one document |
///
/// A further `.gz` or `.zst` is decompressed on the way. A text field that is `null` and a text that is empty are no
/// documents; a file that is not UTF-8 is an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// Each a path, a folder (every file beneath it), a glob (`*` within a name, `**` across folders, `?`, `[ab]`,
    /// `{a,b}`), or any of these as an address (`s3://bucket/folder/*.jsonl.gz`, features `object-store` and `s3`,
    /// `gcs`, `azure`, `http`). Names that begin with a dot are left out below a folder or a glob.
    ///
    /// Documents come in the order of the patterns, and within one in the order of the paths; a file that several
    /// patterns name counts once.
    pub patterns: Vec<String>,
    /// What the files hold, where their names do not say it.
    pub format: Option<Format>,
    /// The field of JSONL, or the column of Parquet, that holds the text.
    pub text_field: String,
}

impl Files {
    /// Files by pattern, their format by name, their text in the field `text`.
    pub fn new(patterns: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let patterns = patterns.into_iter().map(Into::into).collect();
        Self { patterns, format: None, text_field: "text".to_owned() }
    }
}

/// What a file holds, after decompression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// One document.
    Text,
    /// A JSON object a line.
    Jsonl,
    /// A table with a column of text. Needs the feature `parquet`.
    Parquet,
}

/// The source text of the packages that a `Cargo.lock` lists: real text that every machine with a build has.
///
/// Packages come in the order of the lockfile, their files in the order of the paths, so the corpus is the same on
/// every machine. Each file is a document; one that is too large, empty or not UTF-8 is left out. Packages that are not
/// from a registry (members of the workspace, Git dependencies) are left out as well.
///
/// `cargo build` fetches what this machine's platform needs; the lockfile lists the packages of every platform.
/// `cargo fetch --locked` gets them all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CargoRegistry {
    /// Path of the `Cargo.lock`.
    pub lockfile: PathBuf,
    /// Extensions of the files to take, without the dot.
    pub extensions: Vec<String>,
    /// Files of more bytes are left out: they are mostly generated.
    pub max_file_bytes: u64,
    /// The folder that holds `registry/src`; without it `$CARGO_HOME`, or `~/.cargo`.
    pub cargo_home: Option<PathBuf>,
}

impl CargoRegistry {
    /// The Rust and Markdown files of up to a mebibyte.
    pub fn new(lockfile: impl Into<PathBuf>) -> Self {
        let extensions = vec!["rs".to_owned(), "md".to_owned()];
        Self { lockfile: lockfile.into(), extensions, max_file_bytes: 1 << 20, cargo_home: None }
    }
}

/// What a source stands for: an ordered list of items, and what of the source decides their text.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) items: Vec<Item>,
    /// Whatever else changes the documents, for the content address.
    pub(crate) options: String,
    /// `name-version` of packages that are not on this machine, and the folder that should hold them.
    pub(crate) missing: Vec<String>,
    pub(crate) registry: String,
}

/// One file or package.
#[derive(Debug)]
pub(crate) struct Item {
    /// Path, address, or `name-version`.
    pub(crate) name: Arc<str>,
    /// What changes when the content does: size and modification time, an entity tag, or a checksum.
    pub(crate) stamp: String,
    pub(crate) content: Content,
}

#[derive(Debug)]
pub(crate) enum Content {
    File { location: Location, format: Format, compression: Compression, text_field: Arc<str> },
    Package(Package),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Source {
    /// Lists the items; reads none of them.
    pub(crate) fn list(&self) -> Result<Listing> {
        match self {
            Self::Files(files) => files.list(),
            Self::CargoRegistry(registry) => registry.list(),
        }
    }
}

impl Files {
    fn list(&self) -> Result<Listing> {
        let mut found: Vec<Found> = Vec::new();
        for pattern in &self.patterns {
            if pattern.contains("://") {
                found.extend(list_objects(pattern)?);
            } else {
                found.extend(local::list(pattern)?);
            }
        }
        let mut seen = std::collections::HashSet::new();
        found.retain(|file| seen.insert(file.name.clone()));

        let text_field: Arc<str> = self.text_field.as_str().into();
        let items = found.into_iter().map(|file| {
            let (format, compression) = format_of(&file.name, self.format)?;
            let content =
                Content::File { location: file.location, format, compression, text_field: text_field.clone() };
            Ok(Item { name: file.name.into(), stamp: file.stamp, content })
        });
        let items = items.collect::<Result<Vec<_>>>()?;
        let options = format!("files {:?} {:?}", self.format, self.text_field);
        Ok(Listing { items, options, missing: Vec::new(), registry: String::new() })
    }
}

/// A file that a pattern named.
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) stamp: String,
    pub(crate) location: Location,
}

#[cfg(feature = "object-store")]
fn list_objects(pattern: &str) -> Result<Vec<Found>> {
    objects::list(pattern)
}

#[cfg(not(feature = "object-store"))]
fn list_objects(pattern: &str) -> Result<Vec<Found>> {
    Err(Error::FeatureOff { path: pattern.to_owned(), feature: "object-store" })
}

/// What a file's name says it holds; `forced` overrides the format, never the compression.
fn format_of(name: &str, forced: Option<Format>) -> Result<(Format, Compression)> {
    let lower = name.to_ascii_lowercase();
    let (stem, compression) = match lower.rsplit_once('.') {
        Some((stem, "gz")) => (stem, Compression::Gzip),
        Some((stem, "zst")) => (stem, Compression::Zstd),
        _ => (lower.as_str(), Compression::None),
    };
    let format = forced.unwrap_or(match stem.rsplit_once('.') {
        Some((_, "jsonl" | "ndjson")) => Format::Jsonl,
        Some((_, "parquet")) => Format::Parquet,
        _ => Format::Text,
    });
    if format == Format::Parquet {
        if cfg!(not(feature = "parquet")) {
            return Err(Error::FeatureOff { path: name.to_owned(), feature: "parquet" });
        }
        if compression != Compression::None {
            let reason = "Parquet is read at random, so it cannot be compressed as a whole".to_owned();
            return Err(Error::Corrupt { path: name.to_owned(), format: "Parquet", reason });
        }
    }
    Ok((format, compression))
}

/// The part of a pattern that holds no wildcard, up to a slash, and the rest.
pub(crate) fn split_glob(pattern: &str) -> (&str, &str) {
    match pattern.find(['*', '?', '[', '{']) {
        Some(wildcard) => pattern.split_at(pattern[..wildcard].rfind('/').map_or(0, |slash| slash + 1)),
        None => (pattern, ""),
    }
}

/// Compiles a glob in which `*` stays within a name.
pub(crate) fn glob(pattern: &str, whole: &str) -> Result<globset::GlobMatcher> {
    let glob = globset::GlobBuilder::new(pattern).literal_separator(true).build();
    let glob = glob.map_err(|error| Error::Pattern { pattern: whole.to_owned(), reason: error.kind().to_string() })?;
    Ok(glob.compile_matcher())
}
