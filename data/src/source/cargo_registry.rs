//! The packages of a `Cargo.lock`, in the local Cargo registry.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use walkdir::WalkDir;

use crate::error::{Error, Result};
use crate::source::local::walk_error;
use crate::source::{CargoRegistry, Content, Item, Listing};

#[derive(Deserialize)]
struct Lockfile {
    #[serde(default)]
    package: Vec<Locked>,
}

#[derive(Deserialize)]
struct Locked {
    name: String,
    version: String,
    source: Option<String>,
    #[serde(default)]
    checksum: String,
}

/// One package: its unpacked folder, and which of its files count.
#[derive(Debug)]
pub(crate) struct Package {
    folder: PathBuf,
    extensions: Vec<String>,
    max_file_bytes: u64,
}

impl CargoRegistry {
    pub(super) fn list(&self) -> Result<Listing> {
        let path = &self.lockfile;
        if !path.exists() {
            return Err(Error::NotFound { path: path.display().to_string() });
        }
        let bad = |reason: String| Error::Lockfile { path: path.display().to_string(), reason };
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let lockfile: Lockfile = toml::from_str(&text).map_err(|error| bad(error.message().to_owned()))?;

        let registry = self.registry()?;
        let indexes = subfolders(&registry);
        let mut items = Vec::new();
        let mut missing = Vec::new();
        for package in lockfile.package {
            let source = package.source.unwrap_or_default();
            if !source.starts_with("registry+") && !source.starts_with("sparse+") {
                continue;
            }
            let name = format!("{}-{}", package.name, package.version);
            if name.contains(['/', '\\']) {
                return Err(bad(format!("a package cannot be named {name:?}")));
            }
            let folder = indexes.iter().map(|index| index.join(&name)).find(|folder| folder.is_dir());
            if folder.is_none() {
                missing.push(name.clone());
            }
            let content = Content::Package(Package {
                folder: folder.unwrap_or_default(),
                extensions: self.extensions.clone(),
                max_file_bytes: self.max_file_bytes,
            });
            items.push(Item { name: name.into(), stamp: package.checksum, content });
        }
        let options = format!("cargo {:?} {}", self.extensions, self.max_file_bytes);
        Ok(Listing { items, options, missing, registry: registry.display().to_string() })
    }

    fn registry(&self) -> Result<PathBuf> {
        let home = self.cargo_home.clone().or_else(|| std::env::var_os("CARGO_HOME").map(PathBuf::from));
        let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
        let home = home.ok_or(Error::Option {
            option: "cargo_home",
            value: "not set".to_owned(),
            reason: "neither CARGO_HOME nor HOME says where the Cargo registry is",
        })?;
        Ok(home.join("registry").join("src"))
    }
}

/// The folders in a folder, sorted; none if it does not exist.
fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

impl Package {
    /// Calls `document` for each file that counts. Returns how many were left out for their size or encoding: both are
    /// properties of the content, so every machine leaves out the same ones.
    pub(crate) fn read(&self, mut document: impl FnMut(&Path, String) -> Result<()>) -> Result<u64> {
        let mut paths = Vec::new();
        for entry in WalkDir::new(&self.folder) {
            let entry = entry.map_err(|error| walk_error(error, &self.folder))?;
            let wanted = |extension| self.extensions.iter().any(|wanted| extension == wanted.as_str());
            if entry.file_type().is_file() && entry.path().extension().is_some_and(wanted) {
                paths.push(entry.into_path());
            }
        }
        paths.sort();
        let mut skipped = 0;
        for path in paths {
            let size = path.metadata().map_err(Error::io("look up", &path))?.len();
            if size > self.max_file_bytes {
                skipped += 1;
                continue;
            }
            match String::from_utf8(std::fs::read(&path).map_err(Error::io("read", &path))?) {
                Ok(text) => document(&path, text)?,
                Err(_) => skipped += 1,
            }
        }
        Ok(skipped)
    }
}
