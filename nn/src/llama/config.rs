//! The shapes of Llama 3.1 and 3.2, and what they cost.

use crate::{Error, Result, RopeScaling};

/// The shape of a model. Names are TorchTitan's.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key-value heads; each serves `n_heads / n_kv_heads` query heads.
    pub n_kv_heads: usize,
    /// Width of the feed-forward network.
    pub hidden_dim: usize,
    /// Number of tokens.
    pub vocab_size: usize,
    /// Added to the mean square before its root is taken.
    pub norm_eps: f64,
    /// Base of the rotary wavelengths.
    pub rope_theta: f64,
    /// Stretches the rotary wavelengths.
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the head is the embedding table.
    pub tied_embeddings: bool,
    /// Whether a block's output starts smaller with its own depth, rather than with the model's.
    pub depth_init: bool,
}

/// The flavors by name: width, blocks, heads, key-value heads, feed-forward width, rotary scaling factor, tied.
const FLAVORS: [(&str, [usize; 5], f64, bool); 6] = [
    ("debugmodel", [256, 6, 16, 16, 768], 8.0, false),
    ("1B", [2048, 16, 32, 8, 8192], 32.0, true),
    ("3B", [3072, 28, 24, 8, 8192], 32.0, true),
    ("8B", [4096, 32, 32, 8, 14336], 8.0, false),
    ("70B", [8192, 80, 64, 8, 28672], 8.0, false),
    ("405B", [16384, 126, 128, 8, 53248], 8.0, false),
];

impl LlamaConfig {
    /// The names that [`flavor`](Self::flavor) knows.
    pub fn flavors() -> impl Iterator<Item = &'static str> {
        FLAVORS.iter().map(|flavor| flavor.0)
    }

    /// A flavor by its name, for a vocabulary of so many tokens.
    ///
    /// # Errors
    /// When no flavor has that name; the message lists them.
    pub fn flavor(name: &str, vocab_size: usize) -> Result<Self> {
        let known = FLAVORS.iter().find(|flavor| flavor.0.eq_ignore_ascii_case(name));
        let Some(&(_, [dim, n_layers, n_heads, n_kv_heads, hidden_dim], factor, tied_embeddings)) = known else {
            let names: Vec<_> = Self::flavors().collect();
            return Err(Error::Config(format!("no flavor is called {name}; there are {}", names.join(", "))));
        };
        Ok(Self {
            dim,
            n_layers,
            n_heads,
            n_kv_heads,
            hidden_dim,
            vocab_size,
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            rope_scaling: Some(RopeScaling { factor, ..RopeScaling::default() }),
            tied_embeddings,
            depth_init: true,
        })
    }

    /// Features of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.dim / self.n_heads
    }

    /// Checks that the numbers fit each other.
    ///
    /// # Errors
    /// With every reason why they do not.
    pub fn validate(&self) -> Result<()> {
        let mut reasons = Vec::new();
        let sizes = [self.dim, self.n_layers, self.n_heads, self.n_kv_heads, self.hidden_dim, self.vocab_size];
        if sizes.contains(&0) {
            reasons.push("every size must be at least 1".into());
        } else {
            if !self.dim.is_multiple_of(self.n_heads) {
                reasons.push(format!("dim {} is not divisible by n_heads {}", self.dim, self.n_heads));
            } else if !self.head_dim().is_multiple_of(2) {
                reasons.push(format!("dim {} over n_heads {} gives an odd head size", self.dim, self.n_heads));
            }
            if !self.n_heads.is_multiple_of(self.n_kv_heads) {
                reasons.push(format!("n_heads {} is not divisible by n_kv_heads {}", self.n_heads, self.n_kv_heads));
            }
        }
        if reasons.is_empty() { Ok(()) } else { Err(Error::Config(reasons.join("; "))) }
    }

    /// Number of parameters, a tied table counted once.
    #[must_use]
    pub fn parameters(&self) -> usize {
        let kv = self.n_kv_heads * self.head_dim();
        let attention = 2 * self.dim * self.dim + 2 * self.dim * kv;
        let block = attention + 3 * self.dim * self.hidden_dim + 2 * self.dim;
        let tables = if self.tied_embeddings { 1 } else { 2 };
        self.n_layers * block + self.dim + tables * self.embedding_parameters()
    }

    /// Number of parameters of the embedding table.
    #[must_use]
    pub fn embedding_parameters(&self) -> usize {
        self.vocab_size * self.dim
    }

    /// Floating-point operations of one token's forward and backward pass, as TorchTitan counts them: six a parameter
    /// that takes part in a product, and attention in full, as if it were not causal.
    #[must_use]
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        self.product_flops() + self.attention_flops(seq_len)
    }

    /// The same with the causal half of attention alone, as NVIDIA counts it.
    #[must_use]
    pub fn flops_per_token_causal(&self, seq_len: usize) -> f64 {
        self.product_flops() + self.attention_flops(seq_len) / 2.0
    }

    fn product_flops(&self) -> f64 {
        // A tied table is no lookup alone: it takes part in the head's product.
        let lookup = if self.tied_embeddings { 0 } else { self.embedding_parameters() };
        6.0 * (self.parameters() - lookup) as f64
    }

    fn attention_flops(&self, seq_len: usize) -> f64 {
        12.0 * (self.n_layers * self.dim * seq_len) as f64
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn published_sizes() {
        let size = |name, vocabulary| LlamaConfig::flavor(name, vocabulary).unwrap().parameters();
        assert_eq!(size("debugmodel", 2048), 6_163_712);
        assert_eq!(size("1B", 128_256), 1_235_814_400);
        assert_eq!(size("3B", 128_256), 3_212_749_824);
        assert_eq!(size("8B", 128_256), 8_030_261_248);
        assert_eq!(size("70B", 128_256), 70_553_706_496);
        assert_eq!(size("405B", 128_256), 405_853_388_800);
    }

    #[test]
    fn published_flops() {
        let debug = LlamaConfig::flavor("debugmodel", 2048).unwrap();
        assert_eq!(debug.flops_per_token(2048), 71_585_280.0);
        assert_eq!(debug.flops_per_token_causal(2048), 71_585_280.0 - 6.0 * (6 * 256 * 2048) as f64);
    }

    #[test]
    fn contradictions_are_named() {
        let config = LlamaConfig { n_heads: 7, n_kv_heads: 3, ..LlamaConfig::flavor("debugmodel", 256).unwrap() };
        let message = config.validate().unwrap_err().to_string();
        assert!(message.contains("dim 256") && message.contains("n_kv_heads 3"), "{message}");
        let message = LlamaConfig::flavor("9B", 256).unwrap_err().to_string();
        assert!(message.contains("9B") && message.contains("70B"), "{message}");
    }
}
