//! What is kept of a cell that was run to its end, so that it need not be run again.

use super::cell::Cell;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// What a cell's numbers depend on.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    program: String,
    base: String,
    runs: Vec<Vec<String>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    identity: Identity,
    seconds: f64,
}

const FILE: &str = "cell.json";

impl Identity {
    pub(super) fn new(program: &str, base: &str, cell: &Cell) -> Self {
        let words = |flags: &Vec<crate::config::Flag>| flags.iter().map(|flag| flag.text.clone()).collect();
        Self { program: program.to_owned(), base: base.to_owned(), runs: cell.runs.iter().map(words).collect() }
    }
}

/// A program, told from every other build of it.
pub(super) fn program_identity(program: &Path) -> io::Result<String> {
    let file = fs::metadata(program)?;
    let built = file.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(format!("{} {} bytes {}", env!("CARGO_PKG_VERSION"), file.len(), built.as_nanos()))
}

/// The cell in this folder is whole. Written last, and at once.
pub(super) fn finish(folder: &Path, identity: Identity, took: Duration) -> io::Result<()> {
    let record = Record { identity, seconds: took.as_secs_f64() };
    let torn = folder.join("cell.json.torn");
    fs::write(&torn, serde_json::to_vec_pretty(&record)?)?;
    fs::rename(torn, folder.join(FILE))
}

/// How long the cell in this folder took, if it is whole and was run with the same settings by the same program.
pub(super) fn finished(folder: &Path, identity: &Identity) -> Option<Duration> {
    let record: Record = serde_json::from_slice(&fs::read(folder.join(FILE)).ok()?).ok()?;
    (record.identity == *identity).then(|| Duration::try_from_secs_f64(record.seconds).unwrap_or_default())
}
