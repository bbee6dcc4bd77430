//! The folder of a run's dumps.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Dump, Ends};
use crate::{Error, Result};

/// More ranks than this no run has; a file that says so is broken.
const MOST_RANKS: usize = 1 << 20;

/// A larger file is no dump.
const LARGEST: u64 = 1 << 28;

/// What the report itself is called, without the ending.
pub(super) const REPORT: &str = "report";

/// What the name of a file of [`Ends`] begins with; the first rank of its machine follows.
pub(super) const ENDS: &str = "ends_from_";

/// What is in a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum File {
    Dump(Box<Dump>),
    Ends(Ends),
}

/// All that is known of a run's end.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Evidence {
    /// How many ranks there were.
    pub world_size: usize,
    /// What each rank left behind.
    pub dumps: BTreeMap<usize, Dump>,
    /// How each rank's process ended, where somebody saw it.
    pub ends: Ends,
    /// Files that could not be used, and why.
    pub broken: Vec<(String, String)>,
}

impl Evidence {
    /// Takes a rank's dump in.
    ///
    /// # Errors
    /// In words, why it cannot be.
    pub fn add(&mut self, dump: Dump) -> Result<(), String> {
        let (rank, size) = (dump.place.rank, dump.place.world_size);
        self.fit(size)?;
        if rank >= size {
            return Err(format!("it is of rank {rank} of {size}"));
        }
        let told = dump.place.groups.values().flatten().chain(dump.collectives.iter().filter_map(|c| c.peer.as_ref()));
        if let Some(stranger) = told.copied().find(|&member| member >= size) {
            return Err(format!("it speaks of rank {stranger} of {size}"));
        }
        if self.dumps.contains_key(&rank) {
            return Err(format!("another file is of rank {rank} too"));
        }
        self.dumps.insert(rank, dump);
        Ok(())
    }

    /// Takes in how the ranks of a machine ended.
    ///
    /// # Errors
    /// In words, why it cannot be.
    pub fn add_ends(&mut self, ends: Ends) -> Result<(), String> {
        self.fit(ends.world_size)?;
        if let Some((rank, _)) = ends.ranks.iter().find(|(rank, _)| **rank >= ends.world_size) {
            return Err(format!("it speaks of rank {rank} of {}", ends.world_size));
        }
        self.ends.ranks.extend(ends.ranks);
        Ok(())
    }

    fn fit(&mut self, size: usize) -> Result<(), String> {
        match size {
            0 => Err("it is of a run of no ranks".to_owned()),
            _ if size > MOST_RANKS => Err(format!("it is of a run of {size} ranks")),
            _ if self.world_size != 0 && self.world_size != size => {
                Err(format!("it is of a run of {size} ranks, and others of one of {}", self.world_size))
            }
            _ => {
                self.world_size = size;
                self.ends.world_size = size;
                Ok(())
            }
        }
    }
}

/// Reads what the ranks of a run left in a folder. Files that are broken are listed, and the others used.
///
/// # Errors
/// [`Error::Read`] when the folder cannot be read; [`Error::NoDumps`] when nothing in it can be used.
pub fn read_folder(folder: &Path) -> Result<Evidence> {
    let failed = |source| Error::Read { path: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_report = path.file_stem().is_some_and(|stem| stem == REPORT);
        if path.extension().is_some_and(|extension| extension == "json") && !is_report {
            names.push(path);
        }
    }
    names.sort();
    let mut evidence = Evidence::default();
    for path in names {
        let added = read(&path).and_then(|file| match file {
            File::Dump(dump) => evidence.add(*dump),
            File::Ends(ends) => evidence.add_ends(ends),
        });
        if let Err(reason) = added {
            let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            evidence.broken.push((name, reason));
        }
    }
    if evidence.dumps.is_empty() && evidence.ends.ranks.is_empty() {
        let broken = evidence.broken.iter().map(|(name, reason)| format!("; {name}: {reason}")).collect();
        return Err(Error::NoDumps { folder: folder.to_owned(), broken });
    }
    Ok(evidence)
}

/// Removes what an earlier run left in a folder, of ranks whose files begin with `prefix`. A folder that is not there is
/// empty.
///
/// # Errors
/// [`Error::Write`] for a file that cannot be removed.
pub fn clear(folder: &Path, prefix: &str) -> Result<()> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some((stem, "json" | "part" | "txt")) = name.rsplit_once('.') else { continue };
        let number = [prefix, ENDS].into_iter().find_map(|begin| stem.strip_prefix(begin));
        if stem == REPORT || number.is_some_and(|number| number.parse::<usize>().is_ok()) {
            fs::remove_file(&path).map_err(|source| Error::Write { path, source })?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<File, String> {
    let words = |error: io::Error| error.to_string();
    let length = fs::metadata(path).map_err(words)?.len();
    if length > LARGEST {
        return Err(format!("it has {length} bytes, more than any record of a rank"));
    }
    serde_json::from_slice(&fs::read(path).map_err(words)?).map_err(|error| error.to_string())
}

/// Writes a file that is there as a whole or not at all.
pub(super) fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    let written = serde_json::to_vec(value).map_err(io::Error::from).and_then(|bytes| {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let part = path.with_extension("part");
        fs::write(&part, bytes)?;
        fs::rename(&part, path)
    });
    written.map_err(|source| Error::Write { path: path.to_owned(), source })
}
