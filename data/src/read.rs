//! From an item of a source to pieces of text, in constant memory.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Error, Result};
#[cfg(feature = "object-store")]
use crate::source::objects::{Object, ObjectReader};
use crate::source::{Compression, Content, Format, Item};

mod json_line;
#[cfg(feature = "parquet")]
mod parquet_file;

pub(crate) use json_line::text_of_line;

/// A document longer than this is tokenized in pieces, so that memory stays bounded whatever a file holds.
pub(crate) const PIECE: usize = 1 << 20;

/// A line of JSONL is held whole.
const MAX_LINE: usize = 64 << 20;

/// Where the bytes of a file are.
#[derive(Debug)]
pub(crate) enum Location {
    Local(PathBuf),
    #[cfg(feature = "object-store")]
    Object(Object),
}

/// A part of a document, on its way to the tokenizer.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) text: Text,
    /// The file it is from, for messages.
    pub(crate) path: Arc<str>,
    /// Whether the document begins here.
    pub(crate) first: bool,
    /// Whether it ends here.
    pub(crate) last: bool,
}

#[derive(Debug)]
pub(crate) enum Text {
    Plain(String),
    /// A JSON object that holds the text. It is parsed by whoever tokenizes, since that runs on all cores.
    JsonLine {
        bytes: Vec<u8>,
        line: u64,
        field: Arc<str>,
    },
}

impl Piece {
    fn whole(path: &Arc<str>, text: Text) -> Self {
        Self { text, path: path.clone(), first: true, last: true }
    }

    /// Bytes that it holds, for the size of a batch.
    pub(crate) fn bytes(&self) -> usize {
        match &self.text {
            Text::Plain(text) => text.len(),
            Text::JsonLine { bytes, .. } => bytes.len(),
        }
    }
}

/// Hands every document of an item to `sink`, in order. Returns how many files were left out.
pub(crate) fn read_item(item: &Item, sink: &mut dyn FnMut(Piece) -> Result<()>) -> Result<u64> {
    match &item.content {
        Content::Package(package) => {
            package.read(|path, text| sink(Piece::whole(&path.to_string_lossy().into(), Text::Plain(text))))
        }
        Content::File { location, format, compression, text_field } => {
            match format {
                Format::Text => read_text(&item.name, *compression, &mut *open(item, location, *compression)?, sink)?,
                Format::Jsonl => {
                    read_lines(&item.name, *compression, open(item, location, *compression)?, text_field, sink)?;
                }
                #[cfg(feature = "parquet")]
                Format::Parquet => parquet_file::read(&item.name, location, text_field, sink)?,
                #[cfg(not(feature = "parquet"))]
                Format::Parquet => {
                    return Err(Error::FeatureOff { path: item.name.to_string(), feature: "parquet" });
                }
            }
            Ok(0)
        }
    }
}

/// The decompressed bytes of a file.
fn open(item: &Item, location: &Location, compression: Compression) -> Result<Box<dyn Read + Send>> {
    let raw: Box<dyn Read + Send> = match location {
        Location::Local(path) => Box::new(File::open(path).map_err(Error::io("open", path))?),
        #[cfg(feature = "object-store")]
        Location::Object(object) => Box::new(ObjectReader { file: object.open(), offset: 0 }),
    };
    Ok(match compression {
        Compression::None => raw,
        Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(BufReader::with_capacity(1 << 16, raw))),
        Compression::Zstd => {
            Box::new(zstd::stream::read::Decoder::new(raw).map_err(read_error(&item.name, compression))?)
        }
    })
}

/// What a failed read means: of a compressed file, mostly that it is corrupt or cut off.
fn read_error(path: &str, compression: Compression) -> impl Fn(std::io::Error) -> Error {
    move |source| {
        let corrupt = |format| Error::Corrupt { path: path.to_owned(), format, reason: source.to_string() };
        match compression {
            Compression::None => Error::Io { action: "read", path: path.to_owned(), source },
            Compression::Gzip => corrupt("gzip"),
            Compression::Zstd => corrupt("zstd"),
        }
    }
}

/// A file that is one document.
fn read_text(
    path: &Arc<str>,
    compression: Compression,
    reader: &mut dyn Read,
    sink: &mut dyn FnMut(Piece) -> Result<()>,
) -> Result<()> {
    let mut buffer = Vec::new();
    let mut offset = 0;
    let mut first = true;
    loop {
        // One byte more than a piece tells whether the document goes on.
        let wanted = (PIECE + 1 - buffer.len()) as u64;
        reader.take(wanted).read_to_end(&mut buffer).map_err(read_error(path, compression))?;
        let last = buffer.len() <= PIECE;
        let rest = buffer.split_off(piece_end(&buffer));
        let length = buffer.len() as u64;
        let text = String::from_utf8(std::mem::replace(&mut buffer, rest)).map_err(|error| Error::NotUtf8 {
            path: path.to_string(),
            offset: offset + error.utf8_error().valid_up_to() as u64,
        })?;
        sink(Piece { text: Text::Plain(text), path: path.clone(), first, last })?;
        offset += length;
        first = false;
        if last {
            return Ok(());
        }
    }
}

/// Where the first piece of a text ends: after the last line that fits, else before the last space, else at the last
/// whole character. Depends on the text alone, so a document is cut alike whatever file it comes from.
pub(crate) fn piece_end(text: &[u8]) -> usize {
    if text.len() <= PIECE {
        return text.len();
    }
    let window = &text[..PIECE];
    let line = window.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
    let space = || window.iter().rposition(|byte| *byte == b' ').filter(|at| *at > 0);
    let character = || (1..=PIECE).rev().find(|at| text[*at] & 0xC0 != 0x80);
    line.or_else(space).or_else(character).unwrap_or(PIECE)
}

/// A file with a JSON object a line.
fn read_lines(
    path: &Arc<str>,
    compression: Compression,
    reader: Box<dyn Read + Send>,
    field: &Arc<str>,
    sink: &mut dyn FnMut(Piece) -> Result<()>,
) -> Result<()> {
    let mut reader = BufReader::with_capacity(1 << 16, reader);
    for line in 1.. {
        let mut bytes = Vec::new();
        let limit = MAX_LINE as u64 + 1;
        (&mut reader).take(limit).read_until(b'\n', &mut bytes).map_err(read_error(path, compression))?;
        if bytes.is_empty() {
            break;
        }
        if bytes.len() > MAX_LINE {
            return Err(Error::LineTooLong { path: path.to_string(), line, limit: MAX_LINE });
        }
        if line == 1 && bytes.starts_with("\u{feff}".as_bytes()) {
            bytes.drain(..3);
        }
        if !bytes.trim_ascii().is_empty() {
            sink(Piece::whole(path, Text::JsonLine { bytes, line, field: field.clone() }))?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<String> {
        let mut out = Vec::new();
        let mut sink = |piece: Piece| {
            let Text::Plain(text) = piece.text else { panic!("plain text expected") };
            assert_eq!(piece.first, out.is_empty());
            out.push((text, piece.last));
            Ok(())
        };
        read_text(&"x".into(), Compression::None, &mut text.as_bytes(), &mut sink).unwrap();
        assert!(out.iter().rev().skip(1).all(|(_, last)| !last) && out.last().unwrap().1);
        out.into_iter().map(|(text, _)| text).collect()
    }

    #[test]
    fn long_documents_are_cut_at_lines_then_spaces_then_characters() {
        let lines = "0123456789abcdef\n".repeat(PIECE / 8);
        let words = "0123456789abcdef ".repeat(PIECE / 8);
        let wide = "é".repeat(PIECE);
        for (text, begin, end) in [(&lines, "0", "\n"), (&words, " ", "f"), (&wide, "é", "é")] {
            let cut = pieces(text);
            assert!(cut.len() >= 2);
            assert_eq!(&cut.concat(), text);
            for pair in cut.windows(2) {
                assert!(pair[0].len() <= PIECE && pair[0].len() > PIECE - 20);
                assert!(pair[0].ends_with(end) && pair[1].starts_with(begin));
            }
        }
        for length in [0, 1, PIECE - 1, PIECE] {
            assert_eq!(pieces(&"x".repeat(length)).len(), 1);
        }
        assert_eq!(pieces(&"x".repeat(PIECE + 1)).iter().map(String::len).collect::<Vec<_>>(), [PIECE, 1]);
    }

    #[test]
    fn the_first_invalid_byte_is_named() {
        let mut bytes = vec![b'a'; PIECE + 10];
        bytes[PIECE + 3] = 0xff;
        let error = read_text(&"x".into(), Compression::None, &mut &bytes[..], &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, Error::NotUtf8 { offset, .. } if offset == PIECE as u64 + 3), "{error}");
    }
}
