//! The file that says where each document begins: a magic number, the number of documents, and where each document
//! begins and the last one ends, as little-endian `u64`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"ftindex1";

/// Writes the boundaries: one more than documents.
pub(super) fn write(file: &mut impl Write, starts: &[u64]) -> io::Result<()> {
    let mut file = io::BufWriter::with_capacity(1 << 20, file);
    file.write_all(MAGIC)?;
    file.write_all(&(starts.len() as u64 - 1).to_le_bytes())?;
    for start in starts {
        file.write_all(&start.to_le_bytes())?;
    }
    file.flush()
}

/// Reads the boundaries. The inner error says why the file is not the index of so many documents and tokens.
pub(super) fn read(path: &Path, documents: u64, tokens: u64) -> Result<Result<Vec<u64>, String>> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let size = file.metadata().map_err(Error::io("look up", path))?.len();
    // The size is checked first, so that nothing is allocated for documents that are only claimed.
    if documents.checked_mul(8).and_then(|bytes| bytes.checked_add(24)) != Some(size) {
        return Ok(Err(format!("{size} bytes for {documents} documents")));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    file.read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    let Some(rest) = bytes.strip_prefix(MAGIC) else {
        return Ok(Err("it begins with other bytes".to_owned()));
    };
    let mut numbers = rest.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    if numbers.next() != Some(documents) {
        return Ok(Err("it counts other documents than the manifest".to_owned()));
    }
    let starts: Vec<u64> = numbers.collect();
    let whole = starts.first() == Some(&0) && starts.last() == Some(&tokens) && starts.len() as u64 == documents + 1;
    if !whole || starts.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Ok(Err("its boundaries do not rise from the first token to the last".to_owned()));
    }
    Ok(Ok(starts))
}
