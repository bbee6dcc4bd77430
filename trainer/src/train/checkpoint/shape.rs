//! The shape of the model in Hugging Face's terms, which every checkpoint keeps, so that it can be converted anywhere.

use ferrotitan_checkpoint::interchange::hugging_face::{Config, RopeScaling};

use crate::plan::Plan;

/// The shape of the model that a plan trains.
pub(super) fn shape(plan: &Plan) -> Config {
    let model = &plan.model;
    let rope_scaling = model.rope_scaling.map(|scaling| RopeScaling {
        factor: scaling.factor,
        low_frequency_factor: scaling.low_frequency_factor,
        high_frequency_factor: scaling.high_frequency_factor,
        original_context: scaling.original_context,
    });
    // What the rotary wavelengths are stretched for, or what the run trains on.
    let stretched = rope_scaling.map_or(0.0, |scaling| scaling.original_context * scaling.factor);
    Config {
        dim: model.dim,
        n_layers: model.n_layers,
        n_heads: model.n_heads,
        n_kv_heads: model.n_kv_heads,
        hidden_dim: model.hidden_dim,
        vocab_size: model.vocab_size,
        norm_eps: model.norm_eps,
        rope_theta: model.rope_theta,
        rope_scaling,
        max_seq_len: plan.data.seq_len.max(stretched as usize),
        tied_embeddings: model.tied_embeddings,
        bos_token: None,
        eos_tokens: Vec::new(),
    }
}
