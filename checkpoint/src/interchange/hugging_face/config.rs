//! `config.json`: the shape of a Llama.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::interchange::flaw::Flaw;

/// The shape of a Llama, as `config.json` describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key-value heads.
    pub n_kv_heads: usize,
    /// Width of the feed-forward network.
    pub hidden_dim: usize,
    /// Number of tokens.
    pub vocab_size: usize,
    /// Added to the mean square before its root is taken.
    pub norm_eps: f64,
    /// Base of the rotary wavelengths.
    pub rope_theta: f64,
    /// Llama 3.1's stretching of the rotary wavelengths.
    pub rope_scaling: Option<RopeScaling>,
    /// The longest sequence that the model is meant for, in tokens.
    pub max_seq_len: usize,
    /// Whether the head is the embedding table.
    pub tied_embeddings: bool,
    /// The token that starts a text.
    pub bos_token: Option<usize>,
    /// The tokens that end a text.
    pub eos_tokens: Vec<usize>,
}

/// Llama 3.1's stretching of the rotary wavelengths (`rope_type` `llama3`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RopeScaling {
    /// By how much the lowest frequencies are divided.
    pub factor: f64,
    /// Bounds the band of wavelengths that are stretched in full.
    pub low_frequency_factor: f64,
    /// Bounds the band of wavelengths that are kept.
    pub high_frequency_factor: f64,
    /// Sequence length of the original training, in tokens.
    pub original_context: f64,
}

/// Sizes beyond these are no model's; they keep products of two in 64 bits.
const LARGEST: usize = 1 << 31;

impl Config {
    /// Features of a head.
    pub(super) fn head_dim(&self) -> usize {
        self.dim / self.n_heads
    }

    /// Reads `config.json`.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Flaw> {
        let json: Map<String, Value> =
            serde_json::from_slice(bytes).or_else(|error| Flaw::damaged(format!("it is no JSON object: {error}")))?;
        let json = Keys(&json);
        refuse_others(json)?;
        let dim = json.size("hidden_size")?;
        let n_heads = json.size("num_attention_heads")?;
        let (rope_theta, rope_scaling) = rope(json)?;
        let config = Config {
            dim,
            n_layers: json.size("num_hidden_layers")?,
            n_heads,
            n_kv_heads: if json.has("num_key_value_heads") { json.size("num_key_value_heads")? } else { n_heads },
            hidden_dim: json.size("intermediate_size")?,
            vocab_size: json.size("vocab_size")?,
            norm_eps: json.number_or("rms_norm_eps", 1e-6)?,
            rope_theta,
            rope_scaling,
            max_seq_len: if json.has("max_position_embeddings") { json.size("max_position_embeddings")? } else { 2048 },
            tied_embeddings: json.flag("tie_word_embeddings")?,
            bos_token: json.tokens("bos_token_id")?.first().copied(),
            eos_tokens: json.tokens("eos_token_id")?,
        };
        config.check()?;
        if json.has("head_dim") && json.size("head_dim")? != config.head_dim() {
            let reason =
                format!("heads of Ferrotitan's Llama have hidden_size / num_attention_heads = {}", config.head_dim());
            return Flaw::unsupported(format!("head_dim = {}", json.size("head_dim")?), reason);
        }
        Ok(config)
    }

    /// Refuses numbers that do not fit each other.
    pub(super) fn check(&self) -> Result<(), Flaw> {
        let sizes = [self.dim, self.n_layers, self.n_heads, self.n_kv_heads, self.hidden_dim, self.vocab_size];
        if sizes.iter().any(|size| !(1..=LARGEST).contains(size)) {
            return Flaw::damaged("a size is 0, or larger than any model's");
        }
        if !self.dim.is_multiple_of(2 * self.n_heads) {
            return Flaw::damaged(format!(
                "{} heads of even size do not make up a width of {}",
                self.n_heads, self.dim
            ));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Flaw::damaged(format!("{} heads do not share {} key-value heads", self.n_heads, self.n_kv_heads));
        }
        Ok(())
    }

    /// `config.json` for tensors of a dtype of this name.
    pub(super) fn to_json(&self, dtype: &str) -> Value {
        let mut rope = json!({ "rope_theta": self.rope_theta, "rope_type": "default" });
        let mut scaling = Value::Null;
        if let Some(RopeScaling { factor, low_frequency_factor, high_frequency_factor, original_context }) =
            self.rope_scaling
        {
            scaling = json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_frequency_factor,
                "high_freq_factor": high_frequency_factor,
                "original_max_position_embeddings": original_context as u64,
            });
            rope = scaling.clone();
            rope["rope_theta"] = self.rope_theta.into();
        }
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim(),
            "intermediate_size": self.hidden_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            // Before version 5, `transformers` reads the second and third of these, and since then the first.
            "rope_parameters": rope,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "hidden_act": "silu",
            "attention_bias": false,
            "mlp_bias": false,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tied_embeddings,
            "bos_token_id": self.bos_token,
            "eos_token_id": self.eos_json(),
            "initializer_range": 0.02,
            "torch_dtype": dtype,
            "use_cache": true,
        })
    }

    /// One token as a number, several as a list.
    pub(super) fn eos_json(&self) -> Value {
        match self.eos_tokens.as_slice() {
            [] => Value::Null,
            [token] => json!(token),
            tokens => json!(tokens),
        }
    }
}

/// What a Llama can have that ours lacks, is an error that names it.
fn refuse_others(json: Keys<'_>) -> Result<(), Flaw> {
    const OURS: &str = "Ferrotitan's Llama has none";
    let kind = json.text_or("model_type", "llama")?;
    if kind != "llama" {
        return Flaw::unsupported(format!("model_type = {kind:?}"), "only Llama can be read");
    }
    if let Some(Value::Array(names)) = json.0.get("architectures")
        && !names.iter().any(|name| name == "LlamaForCausalLM")
    {
        return Flaw::unsupported(format!("architectures = {names:?}"), "only LlamaForCausalLM can be read");
    }
    let act = json.text_or("hidden_act", "silu")?;
    if act != "silu" && act != "swish" {
        return Flaw::unsupported(format!("hidden_act = {act:?}"), "Ferrotitan's Llama has silu");
    }
    for key in ["attention_bias", "mlp_bias"] {
        if json.flag(key)? {
            return Flaw::unsupported(key, OURS);
        }
    }
    if json.has("quantization_config") {
        return Flaw::unsupported("quantization_config", "quantized weights cannot be read; convert them first");
    }
    if json.has("sliding_window") {
        return Flaw::unsupported("sliding_window", OURS);
    }
    // Released by others than Llama's authors under its name.
    for key in ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"] {
        if json.number_or(key, 1.0)? != 1.0 {
            return Flaw::unsupported(key, OURS);
        }
    }
    Ok(())
}

/// Base and stretching of the rotary wavelengths. `transformers` has written them in two ways.
fn rope(json: Keys<'_>) -> Result<(f64, Option<RopeScaling>), Flaw> {
    let mut theta = json.number_or("rope_theta", 10_000.0)?;
    if json.number_or("partial_rotary_factor", 1.0)? != 1.0 {
        return Flaw::unsupported("partial_rotary_factor", "Ferrotitan's Llama rotates all features of a head");
    }
    let scaling = match ["rope_parameters", "rope_scaling"].into_iter().find(|key| json.has(key)) {
        Some(key) => json.object(key)?,
        None => return Ok((theta, None)),
    };
    theta = scaling.number_or("rope_theta", theta)?;
    if scaling.number_or("partial_rotary_factor", 1.0)? != 1.0 {
        return Flaw::unsupported("partial_rotary_factor", "Ferrotitan's Llama rotates all features of a head");
    }
    let kind = scaling.text_or("rope_type", scaling.text_or("type", "default")?)?;
    match kind {
        "default" => Ok((theta, None)),
        "llama3" => {
            let scaling = RopeScaling {
                factor: scaling.number("factor")?,
                low_frequency_factor: scaling.number("low_freq_factor")?,
                high_frequency_factor: scaling.number("high_freq_factor")?,
                original_context: scaling.number("original_max_position_embeddings")?,
            };
            Ok((theta, Some(scaling)))
        }
        other => Flaw::unsupported(
            format!("rope_type = {other:?}"),
            "Ferrotitan's Llama has `default` and `llama3`; the wavelengths would be others",
        ),
    }
}

/// The keys of a JSON object. A key that is null is as good as absent.
#[derive(Clone, Copy)]
struct Keys<'a>(&'a Map<String, Value>);

impl<'a> Keys<'a> {
    fn has(self, key: &str) -> bool {
        self.0.get(key).is_some_and(|value| !value.is_null())
    }

    fn read<T>(self, key: &str, what: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<T, Flaw> {
        match self.0.get(key).and_then(read) {
            Some(value) => Ok(value),
            None => Flaw::damaged(format!("`{key}` should be {what}")),
        }
    }

    fn size(self, key: &str) -> Result<usize, Flaw> {
        self.read(key, "a whole number", |value| usize::try_from(value.as_u64()?).ok())
    }

    fn number(self, key: &str) -> Result<f64, Flaw> {
        self.read(key, "a number", Value::as_f64)
    }

    fn number_or(self, key: &str, default: f64) -> Result<f64, Flaw> {
        if self.has(key) { self.number(key) } else { Ok(default) }
    }

    fn flag(self, key: &str) -> Result<bool, Flaw> {
        if self.has(key) { self.read(key, "true or false", Value::as_bool) } else { Ok(false) }
    }

    fn text_or(self, key: &str, default: &'a str) -> Result<&'a str, Flaw> {
        if self.has(key) { self.read(key, "a string", Value::as_str) } else { Ok(default) }
    }

    fn object(self, key: &str) -> Result<Keys<'a>, Flaw> {
        self.read(key, "an object", Value::as_object).map(Keys)
    }

    /// One token, several, or none.
    fn tokens(self, key: &str) -> Result<Vec<usize>, Flaw> {
        let token = |value: &Value| usize::try_from(value.as_u64()?).ok();
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(_)) => {
                self.read(key, "a list of tokens", |value| value.as_array()?.iter().map(token).collect())
            }
            Some(_) => self.read(key, "a token", |value| Some(vec![token(value)?])),
        }
    }
}
