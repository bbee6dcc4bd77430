//! `[model]`: which model, which tokenizer, and single dimensions where they differ from the flavor's.

use super::{Names, words};
use crate::config::section::section;

section! {
    /// `[model]`: which model is trained, with which tokenizer.
    pub struct Model {
        /// The family of models: "llama3".
        pub name: String = "llama3".into(),
        /// The member of the family: "debugmodel", "1B", "3B", "8B", "70B" or "405B".
        pub flavor: String = "debugmodel".into(),
        /// Folder with Hugging Face files of the model; its `tokenizer.json` is the tokenizer. Not set: see
        /// `tokenizer_path`.
        pub hf_assets_path: Option<String> = None,
        /// A `tokenizer.json`, a folder that has one, or "byte" for the tokenizer that needs no file: a token a byte.
        /// Goes before `hf_assets_path`; the byte tokenizer is taken where neither is set.
        pub tokenizer_path: Option<String> = None,
        /// What is done to the model after it is built: "float8" for Float8 linear layers, "mx" for
        /// linear layers in a microscaling format.
        pub converters: Names = Names::default(),
        /// Print the model after its converters.
        pub print_after_conversion: bool = false,
        /// Ferrotitan: what a token sees. "causal": all tokens before it in its sequence. "block_causal": those of them
        /// that are of its document.
        pub attn_mask_type: AttnMask = AttnMask::Causal,
        /// Ferrotitan: tokens of the vocabulary, instead of the tokenizer's.
        pub vocab_size: Option<usize> = None,
        /// Ferrotitan: transformer blocks, instead of the flavor's.
        pub n_layers: Option<usize> = None,
        /// Ferrotitan: width of the residual stream, instead of the flavor's.
        pub dim: Option<usize> = None,
        /// Ferrotitan: width of the feed-forward layer, instead of the flavor's.
        pub ffn_dim: Option<usize> = None,
        /// Ferrotitan: attention heads, instead of the flavor's.
        pub n_heads: Option<usize> = None,
        /// Ferrotitan: heads of keys and values, each shared by as many query heads as divide them; instead of the
        /// flavor's.
        pub n_kv_heads: Option<usize> = None,
        /// Ferrotitan: base of the rotary embedding, instead of the flavor's.
        pub rope_theta: Option<f64> = None,
        /// Ferrotitan: the epsilon of RMSNorm, instead of the flavor's.
        pub norm_eps: Option<f64> = None,
        /// Ferrotitan: one matrix for embedding and head, instead of the flavor's choice.
        pub tie_embeddings: Option<bool> = None,
    }
}

words! {
    /// What a token may attend to.
    pub enum AttnMask {
        /// All tokens before it in the sequence.
        Causal = "causal",
        /// Those of them that belong to its document.
        BlockCausal = "block_causal",
    }
}
