//! Files of this machine, by path, folder or glob.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use crate::error::{Error, Result};
use crate::read::Location;
use crate::source::{Found, glob, split_glob};

/// The files that a pattern names, in the order of their paths.
pub(crate) fn list(pattern: &str) -> Result<Vec<Found>> {
    let path = Path::new(pattern);
    // A name that exists is meant literally, even if it looks like a glob.
    let (base, matcher) = if path.is_file() {
        return Ok(vec![found(path.to_owned())?]);
    } else if path.is_dir() {
        (path, None)
    } else {
        let (base, rest) = split_glob(pattern);
        if rest.is_empty() {
            return Err(Error::NotFound { path: pattern.to_owned() });
        }
        (Path::new(if base.is_empty() { "." } else { base }), Some(glob(rest, pattern)?))
    };
    if !base.is_dir() {
        return Err(Error::NoMatch { pattern: pattern.to_owned() });
    }

    let hidden = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b".");
    let walk = WalkDir::new(base).into_iter().filter_entry(|entry| entry.depth() == 0 || !hidden(entry.file_name()));
    let mut paths = Vec::new();
    for entry in walk {
        let entry = entry.map_err(|error| walk_error(error, base))?;
        let relative = entry.path().strip_prefix(base).unwrap_or(entry.path());
        // Hugging Face's cache holds links to files, so links count; links to folders could go round in circles.
        if matcher.as_ref().is_none_or(|glob| glob.is_match(relative)) && entry.path().is_file() {
            paths.push(entry.path().to_owned());
        }
    }
    if paths.is_empty() {
        return Err(Error::NoMatch { pattern: pattern.to_owned() });
    }
    paths.sort();
    paths.into_iter().map(found).collect()
}

fn found(path: PathBuf) -> Result<Found> {
    let path = std::path::absolute(&path).map_err(Error::io("resolve", &path))?;
    let data = path.metadata().map_err(Error::io("look up", &path))?;
    let stamp = format!("{} {} {}", data.len(), data.mtime(), data.mtime_nsec());
    Ok(Found { name: path.to_string_lossy().into_owned(), stamp, location: Location::Local(path) })
}

/// What stopped a walk, with the path where it did.
pub(crate) fn walk_error(error: walkdir::Error, base: &Path) -> Error {
    let path = error.path().unwrap_or(base).to_owned();
    Error::io("list", &path)(error.into())
}
