//! Hugging Face's `tokenizer.json`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result, panic_message};
use crate::tokenizer::Tokenizer;

/// A tokenizer read from Hugging Face's `tokenizer.json`.
///
/// The file's own truncation and padding are switched off, and its post-processor is not used: what begins and ends a
/// document is [`bos`](Tokenizer::bos) and [`eos`](Tokenizer::eos). Special tokens that a text spells out are
/// recognized as such, as Hugging Face's own tools do.
#[derive(Debug)]
pub struct HfTokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    bos: Option<u32>,
    eos: Option<u32>,
    identity: String,
}

impl HfTokenizer {
    /// Loads `tokenizer.json`, given itself or as the folder that holds it.
    ///
    /// The tokens that begin and end a document come from `tokenizer_config.json` beside it (`bos_token`, `eos_token`,
    /// each a string or an object with `content`; `null` says that there is none). Where that file or key is missing,
    /// they come from `bos_token_id` and `eos_token_id` of `config.json` (a number, or a list whose first counts).
    ///
    /// # Errors
    /// [`Error::NotFound`] or [`Error::Io`] for a file that cannot be read, [`Error::Tokenizer`] for one that is
    /// corrupt, that names a token which is not in the vocabulary, or whose largest id is out of proportion to the
    /// number of its tokens.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let given = path.as_ref();
        let path = if given.is_dir() { given.join("tokenizer.json") } else { given.to_owned() };
        if !path.exists() {
            return Err(Error::NotFound { path: path.display().to_string() });
        }
        let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let bad = |reason| Error::Tokenizer { name: path.display().to_string(), reason };

        let mut inner = no_panic(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(bad)?;
        inner.with_truncation(None).map_err(|error| bad(error.to_string()))?;
        inner.with_padding(None);
        let vocab_size = vocab_size(&inner).map_err(bad)?;

        let folder = path.parent().unwrap_or(Path::new(""));
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let model = read_json(&folder.join("config.json"))?;
        let special = |name: &str| -> Result<Option<u32>> {
            match config.get(name) {
                Some(Value::Null) => Ok(None),
                Some(token) => {
                    let text = token.as_str().or_else(|| token.get("content")?.as_str());
                    let text = text.ok_or_else(|| bad(format!("{name} of tokenizer_config.json is no token")))?;
                    let id = inner.token_to_id(text);
                    Ok(Some(id.ok_or_else(|| bad(format!("its {name} {text:?} is not in the vocabulary")))?))
                }
                None => {
                    let key = format!("{name}_id");
                    let id = match model.get(&key) {
                        None | Some(Value::Null) => return Ok(None),
                        Some(Value::Array(ids)) => ids.first().and_then(Value::as_u64),
                        Some(id) => id.as_u64(),
                    };
                    let id = id.filter(|id| *id < vocab_size as u64).and_then(|id| u32::try_from(id).ok());
                    Ok(Some(id.ok_or_else(|| bad(format!("{key} of config.json is not in the vocabulary")))?))
                }
            }
        };
        let (bos, eos) = (special("bos_token")?, special("eos_token")?);
        let identity = format!("hf {} {bos:?} {eos:?}", crate::store::hex(&Sha256::digest(&bytes)));
        Ok(Self { path, inner, vocab_size, bos, eos, identity })
    }

    fn failed(&self, reason: String) -> Error {
        Error::Tokenizer { name: self.path.display().to_string(), reason }
    }
}

impl Tokenizer for HfTokenizer {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = no_panic(|| self.inner.encode_fast(text, false)).map_err(|reason| self.failed(reason))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn decode(&self, tokens: &[u32]) -> Result<String> {
        if let Some(token) = tokens.iter().find(|token| self.inner.id_to_token(**token).is_none()) {
            return Err(self.failed(format!("token {token} is not in the vocabulary")));
        }
        no_panic(|| self.inner.decode(tokens, true)).map_err(|reason| self.failed(reason))
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn bos(&self) -> Option<u32> {
        self.bos
    }

    fn eos(&self) -> Option<u32> {
        self.eos
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }
}

/// The library panics on some files that it should refuse, and these files come from anywhere.
fn no_panic<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(panic_message(&*panic)),
    }
}

/// The largest id and one. An id far beyond the number of tokens would make a model allocate rows for nothing, so it is
/// refused; the bound leaves room for vocabularies that reserve a range.
fn vocab_size(inner: &tokenizers::Tokenizer) -> Result<usize, String> {
    let vocab = inner.get_vocab(true);
    let largest = vocab.values().copied().max().ok_or("the vocabulary is empty")? as usize;
    if largest > 4 * vocab.len() + 65_536 {
        return Err(format!("token id {largest} is out of proportion to {} tokens", vocab.len()));
    }
    Ok(largest + 1)
}

/// A JSON file that may be missing: then an empty object.
fn read_json(path: &Path) -> Result<Value> {
    if !path.exists() {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    serde_json::from_slice(&bytes)
        .map_err(|error| Error::Tokenizer { name: path.display().to_string(), reason: error.to_string() })
}
