//! Llama 3.1 (<https://arxiv.org/abs/2407.21783>), written once, for one rank.

mod block;
mod config;

pub use block::Block;
pub use config::LlamaConfig;

use ferrotitan_mesh::rng::Distribution;

use crate::{Embedding, Head, Model, NamedLayer, Plain, Projection, Result, RmsNorm, Rope};

/// The model without storage: `tok_embeddings`, `layers.0`, …, `norm`, `output`.
///
/// # Errors
/// When the configuration contradicts itself.
pub fn build(config: &LlamaConfig) -> Result<Model> {
    config.validate()?;
    let head_init = normal_within(1.0 / (config.dim as f64).sqrt(), 3.0);
    // A tied table starts as a head, not as an embedding: unit variance would make the first logits as large as the
    // square root of the width.
    let embedding_init = if config.tied_embeddings { head_init } else { Distribution::Normal { mean: 0.0, std: 1.0 } };
    let embedding = Embedding::new("tok_embeddings", config.vocab_size, config.dim, embedding_init);
    let mut output = Projection::new("output", config.dim, config.vocab_size, head_init);
    if config.tied_embeddings {
        output.weight = embedding.weight().clone();
    }
    let rope = Rope::new(config.head_dim(), config.rope_theta, config.rope_scaling)?;
    let mut layers = vec![NamedLayer::new("tok_embeddings", embedding)];
    for index in 0..config.n_layers {
        layers.push(NamedLayer::new(format!("layers.{index}"), Block::new(config, index, &rope)));
    }
    layers.push(NamedLayer::new("norm", RmsNorm::new("norm", config.dim, config.norm_eps)));
    layers.push(NamedLayer::new("output", Head::new("output", Box::new(Plain::new(vec![output])))));
    Ok(Model::new(layers))
}

/// A normal distribution cut at so many standard deviations.
fn normal_within(std: f64, deviations: f64) -> Distribution {
    Distribution::TruncatedNormal { mean: 0.0, std, low: -deviations * std, high: deviations * std }
}
