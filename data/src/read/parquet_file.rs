//! The text column of a Parquet file.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{ChunkReader, FileReader, Length, SerializedFileReader};

use crate::error::{Error, Result, panic_message};
use crate::read::{Location, Piece, Text};
#[cfg(feature = "object-store")]
use crate::source::objects::ObjectFile;

/// Rows decoded at a time.
const ROWS: usize = 64;

/// Hands every row of the column `field` to `sink`. Rows that are null are no documents.
pub(super) fn read(
    path: &Arc<str>,
    location: &Location,
    field: &str,
    sink: &mut dyn FnMut(Piece) -> Result<()>,
) -> Result<()> {
    let corrupt = |reason| Error::Corrupt { path: path.to_string(), format: "Parquet", reason };
    let bytes = RandomAccess::open(location)?;
    // The decoder is hardened but not proven against corrupt files, and these come from anywhere.
    let result = catch_unwind(AssertUnwindSafe(|| read_column(path, bytes, field, sink)));
    result.unwrap_or_else(|panic| Err(corrupt(panic_message(&*panic))))
}

fn read_column(
    path: &Arc<str>,
    bytes: RandomAccess,
    field: &str,
    sink: &mut dyn FnMut(Piece) -> Result<()>,
) -> Result<()> {
    let corrupt =
        |error: ParquetError| Error::Corrupt { path: path.to_string(), format: "Parquet", reason: error.to_string() };
    let file = SerializedFileReader::new(bytes).map_err(corrupt)?;
    let schema = file.metadata().file_metadata().schema_descr();
    let column = schema.columns().iter().position(|column| column.path().string() == field);
    let column = column.ok_or_else(|| Error::MissingField {
        place: path.to_string(),
        field: field.to_owned(),
        found: schema.columns().iter().map(|column| column.path().string()).collect(),
    })?;
    let kind = schema.column(column);
    let wrong_type = |found: String| Error::FieldType { place: path.to_string(), field: field.to_owned(), found };
    if kind.max_rep_level() > 0 {
        return Err(wrong_type("a list".to_owned()));
    }
    if kind.physical_type() != Type::BYTE_ARRAY {
        return Err(wrong_type(format!("of type {}", kind.physical_type())));
    }

    for group in 0..file.num_row_groups() {
        let rows = file.get_row_group(group).map_err(corrupt)?;
        let ColumnReader::ByteArrayColumnReader(mut reader) = rows.get_column_reader(column).map_err(corrupt)? else {
            return Err(wrong_type("of another type in some row group".to_owned()));
        };
        loop {
            // Levels tell which rows are null, and those are left out of the values already.
            let (mut levels, mut values) = (Vec::new(), Vec::new());
            let (records, _, _) = reader.read_records(ROWS, Some(&mut levels), None, &mut values).map_err(corrupt)?;
            if records == 0 {
                break;
            }
            for value in values {
                let text = std::str::from_utf8(value.data()).map_err(|error| Error::Corrupt {
                    path: path.to_string(),
                    format: "Parquet",
                    reason: format!("a value of {field:?} is not UTF-8: {error}"),
                })?;
                sink(Piece::whole(path, Text::Plain(text.to_owned())))?;
            }
        }
    }
    Ok(())
}

/// A file that is read at offsets which the file itself claims: every range is checked before anything is allocated.
struct RandomAccess {
    bytes: Arc<Backing>,
    length: u64,
}

enum Backing {
    Local(File),
    #[cfg(feature = "object-store")]
    Object(ObjectFile),
}

impl RandomAccess {
    fn open(location: &Location) -> Result<Self> {
        let (bytes, length) = match location {
            Location::Local(path) => {
                let file = File::open(path).map_err(Error::io("open", path))?;
                let length = file.metadata().map_err(Error::io("look up", path))?.len();
                (Backing::Local(file), length)
            }
            #[cfg(feature = "object-store")]
            Location::Object(object) => (Backing::Object(object.open()), object.size()),
        };
        Ok(Self { bytes: Arc::new(bytes), length })
    }
}

impl Backing {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Local(file) => file.read_at(into, offset),
            #[cfg(feature = "object-store")]
            Self::Object(object) => object.read_at(offset, into),
        }
    }
}

impl Length for RandomAccess {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for RandomAccess {
    type T = BufReader<Tail>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        Ok(BufReader::new(Tail { bytes: self.bytes.clone(), offset: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.length) {
            return Err(ParquetError::EOF(format!("{length} bytes at {start} of a file of {}", self.length)));
        }
        let mut buffer = vec![0; length];
        Tail { bytes: self.bytes.clone(), offset: start }.read_exact(&mut buffer)?;
        Ok(buffer.into())
    }
}

/// Reads from an offset on.
struct Tail {
    bytes: Arc<Backing>,
    offset: u64,
}

impl Read for Tail {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.bytes.read_at(self.offset, into)?;
        self.offset += read as u64;
        Ok(read)
    }
}
