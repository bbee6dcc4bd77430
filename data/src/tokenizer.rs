//! What turns text into token ids, and the tokenizer that needs no file.

use crate::error::{Error, Result};

/// Text to token ids and back.
///
/// A document becomes `bos`, the ids of its text, `eos`: [`encode`](Self::encode) itself adds neither.
pub trait Tokenizer: Send + Sync {
    /// The token ids of a text, without the tokens that begin and end a document.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] where the text cannot be encoded.
    fn encode(&self, text: &str) -> Result<Vec<u32>>;

    /// The text of token ids, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] where an id is not one of the vocabulary.
    fn decode(&self, tokens: &[u32]) -> Result<String>;

    /// Rows that an embedding needs: the largest id and one.
    fn vocab_size(&self) -> usize;

    /// The token that begins a document, if the vocabulary has one.
    fn bos(&self) -> Option<u32>;

    /// The token that ends a document, if the vocabulary has one.
    fn eos(&self) -> Option<u32>;

    /// A string that differs between tokenizers that encode differently. Token stores are addressed by it.
    fn identity(&self) -> String;
}

/// One token per byte, and two for the beginning and the end of a document: a vocabulary of 258.
///
/// ```
/// use ferrotitan_data::{ByteTokenizer, Tokenizer};
///
/// let tokens = ByteTokenizer.encode("né").unwrap();
/// assert_eq!(tokens, [110, 195, 169]);
/// assert_eq!(ByteTokenizer.decode(&tokens).unwrap(), "né");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ByteTokenizer;

const BOS: u32 = 256;
const EOS: u32 = 257;

impl Tokenizer for ByteTokenizer {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn decode(&self, tokens: &[u32]) -> Result<String> {
        let mut bytes = Vec::with_capacity(tokens.len());
        for &token in tokens {
            match token {
                BOS | EOS => {}
                _ => bytes.push(u8::try_from(token).map_err(|_| Error::Tokenizer {
                    name: self.identity(),
                    reason: format!("token {token} is not one of its {}", self.vocab_size()),
                })?),
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn vocab_size(&self) -> usize {
        258
    }

    fn bos(&self) -> Option<u32> {
        Some(BOS)
    }

    fn eos(&self) -> Option<u32> {
        Some(EOS)
    }

    fn identity(&self) -> String {
        "bytes".to_owned()
    }
}
