//! The shape of the model that a config asks for.

use super::Config;
use super::nearest::nearest;
use super::problem::Problem;
use crate::plan::Tokenizer;
use ferrotitan_nn::llama::LlamaConfig;

/// The largest size of anything: more than any model has, and its products stay within 64 bits.
const LARGEST: usize = 1 << 24;

/// The shape of the model: the flavor's, with what the config says otherwise, for the tokenizer's vocabulary unless the
/// config says otherwise.
///
/// # Errors
/// When there is no such model or tokenizer, or its sizes do not fit each other.
pub fn shape(config: &Config) -> Result<LlamaConfig, Vec<Problem>> {
    let model = &config.model;
    let mut problems = Vec::new();
    if model.name != "llama3" {
        let problem = Problem::new(&["model.name"], format!("there is no model `{}`", model.name));
        return Err(vec![problem.help("the models are llama3")]);
    }
    let vocabulary = vocabulary(config).unwrap_or_else(|problem| {
        problems.push(problem);
        1
    });
    let Ok(mut shape) = LlamaConfig::flavor(&model.flavor, vocabulary) else {
        let names: Vec<_> = LlamaConfig::flavors().collect();
        let near = nearest(&model.flavor, names.iter().copied()).unwrap_or_default();
        let problem = Problem::new(&["model.flavor"], format!("llama3 has no flavor `{}`", model.flavor));
        problems.push(problem.help(format!("the nearest is `{near}`; there are {}", names.join(", "))));
        return Err(problems);
    };
    shape.n_layers = model.n_layers.unwrap_or(shape.n_layers);
    shape.dim = model.dim.unwrap_or(shape.dim);
    shape.hidden_dim = model.ffn_dim.unwrap_or(shape.hidden_dim);
    shape.n_heads = model.n_heads.unwrap_or(shape.n_heads);
    shape.n_kv_heads = model.n_kv_heads.unwrap_or(shape.n_kv_heads);
    shape.rope_theta = model.rope_theta.unwrap_or(shape.rope_theta);
    shape.norm_eps = model.norm_eps.unwrap_or(shape.norm_eps);
    shape.tied_embeddings = model.tie_embeddings.unwrap_or(shape.tied_embeddings);

    let sizes = [
        ("model.n_layers", shape.n_layers),
        ("model.dim", shape.dim),
        ("model.ffn_dim", shape.hidden_dim),
        ("model.n_heads", shape.n_heads),
        ("model.n_kv_heads", shape.n_kv_heads),
    ];
    let outside = sizes.iter().filter(|(_, size)| !(1..=LARGEST).contains(size));
    problems.extend(
        outside.map(|(key, size)| Problem::new(&[key], format!("`{key}` is {size}, and must be from 1 to {LARGEST}"))),
    );
    if sizes.iter().all(|(_, size)| *size > 0) {
        problems.extend(heads(&shape));
    }
    if problems.is_empty() { Ok(shape) } else { Err(problems) }
}

/// How many tokens the model knows: at least those of the tokenizer.
fn vocabulary(config: &Config) -> Result<usize, Problem> {
    let known = Tokenizer::of(config).vocabulary();
    let Some(size) = config.model.vocab_size else { return known };
    match known {
        _ if size > LARGEST => Err(Problem::new(
            &["model.vocab_size"],
            format!("`model.vocab_size` is {size}, and must be at most {LARGEST}"),
        )),
        Ok(known) if size < known => {
            let message = format!("`model.vocab_size` is {size}, and the tokenizer has {known} tokens");
            let keys = ["model.vocab_size", "model.tokenizer_path"];
            Err(Problem::new(&keys, message).help(format!("set it to {known} or more, or leave it out")))
        }
        // A config can be looked at where its tokenizer is not.
        _ if size > 0 => Ok(size),
        _ => Err(Problem::new(&["model.vocab_size"], "`model.vocab_size` is 0, and must be at least 1")),
    }
}

/// Whether the heads divide what they have to divide.
fn heads(shape: &LlamaConfig) -> Option<Problem> {
    let (dim, heads, kv_heads) = (shape.dim, shape.n_heads, shape.n_kv_heads);
    if !dim.is_multiple_of(heads) {
        let message = format!("{heads} heads do not divide a width of {dim}");
        let help = format!("`model.n_heads` may be {}", divisors_near(dim, heads));
        return Some(Problem::new(&["model.n_heads", "model.dim"], message).help(help));
    }
    if !(dim / heads).is_multiple_of(2) {
        let message = format!("a width of {dim} over {heads} heads gives heads of {}", dim / heads);
        let problem = Problem::new(&["model.n_heads", "model.dim"], message);
        return Some(problem.help("the rotary embedding needs an even number"));
    }
    if !heads.is_multiple_of(kv_heads) {
        let message = format!("{kv_heads} key-value heads do not divide {heads} heads");
        let help = format!("`model.n_kv_heads` may be {}", divisors_near(heads, kv_heads));
        return Some(Problem::new(&["model.n_kv_heads", "model.n_heads"], message).help(help));
    }
    None
}

/// The divisors of `n` on both sides of `wish`.
fn divisors_near(n: usize, wish: usize) -> String {
    let below = (1..wish.min(n + 1)).rev().find(|d| n.is_multiple_of(*d));
    let above = (wish.max(1)..=n).find(|d| n.is_multiple_of(*d));
    match (below, above) {
        (Some(below), Some(above)) => format!("{below} or {above}"),
        (one, other) => one.or(other).unwrap_or(1).to_string(),
    }
}
