//! A transformer block.
//!
//! Shape suffixes: b batch, s sequence, d model width, h query heads, g key-value heads, k features of a head. `h` and `g`
//! are read off the projections' outputs, since tensor parallelism leaves a rank only some of the heads.

use ferrotitan_mesh::rng::Distribution;
use tch::Tensor;

use super::LlamaConfig;
use crate::error::Context as _;
use crate::feed_forward::exactly;
use crate::{
    Attention, Batch, FeedForward, Layer, Linear, Parameter, Plain, Projection, Result, RmsNorm, Rope, Sdpa, Seam,
};

/// Attention and feed-forward network, each behind a norm and added to the residual stream.
#[derive(Debug)]
pub struct Block {
    name: String,
    head_dim: i64,
    rope: Rope,
    attention_norm: RmsNorm,
    /// `wq`, `wk` and `wv`: one input, three projections.
    qkv: Box<dyn Linear>,
    attention: Box<dyn Attention>,
    wo: Box<dyn Linear>,
    ffn_norm: RmsNorm,
    feed_forward: FeedForward,
}

impl Block {
    /// Block number `index` of the model. All blocks are given the same rotary embedding.
    #[must_use]
    pub fn new(config: &LlamaConfig, index: usize, rope: &Rope) -> Self {
        let name = format!("layers.{index}");
        let (dim, hidden, head_dim) = (config.dim, config.hidden_dim, config.head_dim());
        let (q, kv) = (config.n_heads * head_dim, config.n_kv_heads * head_dim);
        // TorchTitan's initialization: what writes into the residual stream starts smaller the deeper it stands, and the
        // cut at ±2 is absolute, not in standard deviations.
        let cut = |std| Distribution::TruncatedNormal { mean: 0.0, std, low: -2.0, high: 2.0 };
        let depth = if config.depth_init { index + 1 } else { config.n_layers };
        let (reads, writes) = (cut(0.02), cut(0.02 / (2.0 * depth as f64).sqrt()));
        let projection =
            |part: &str, inputs, outputs, init| Projection::new(&format!("{name}.{part}"), inputs, outputs, init);
        let linear = |projections| Box::new(Plain::new(projections)) as Box<dyn Linear>;
        let qkv = linear(vec![
            projection("attention.wq", dim, q, reads),
            projection("attention.wk", dim, kv, reads),
            projection("attention.wv", dim, kv, reads),
        ]);
        let gate_and_up = linear(vec![
            projection("feed_forward.w1", dim, hidden, reads),
            projection("feed_forward.w3", dim, hidden, writes),
        ]);
        let down = linear(vec![projection("feed_forward.w2", hidden, dim, writes)]);
        Self {
            head_dim: head_dim as i64,
            rope: rope.clone(),
            attention_norm: RmsNorm::new(&format!("{name}.attention_norm"), dim, config.norm_eps),
            qkv,
            attention: Box::new(Sdpa),
            wo: linear(vec![projection("attention.wo", q, dim, writes)]),
            ffn_norm: RmsNorm::new(&format!("{name}.ffn_norm"), dim, config.norm_eps),
            feed_forward: FeedForward::new(&format!("{name}.feed_forward"), gate_and_up, down),
            name,
        }
    }

    fn attend(&mut self, x_bsd: &Tensor, batch: &Batch) -> Result<Tensor> {
        let [q, k, v] = exactly(self.qkv.forward(&self.attention_norm.normalize(x_bsd)?)?)?;
        let (b, s) = batch.positions.size2().context("Block")?;
        let by_head = |x: &Tensor| x.f_view([b, s, -1, self.head_dim]).context("Block");
        let rotations = self.rope.rotations(&batch.positions, x_bsd.kind())?;
        let q_bshk = Rope::rotate(&by_head(&q)?, &rotations)?;
        let k_bsgk = Rope::rotate(&by_head(&k)?, &rotations)?;
        let out_bshk = self.attention.forward(&q_bshk, &k_bsgk, &by_head(&v)?, batch)?;
        let merged = out_bshk.f_reshape([b, s, -1]).context("Block")?;
        exactly(self.wo.forward(&merged)?).map(|[out]| out)
    }
}

impl Layer for Block {
    fn forward(&mut self, x_bsd: &Tensor, batch: &Batch) -> Result<Tensor> {
        let x_bsd = x_bsd.f_add(&self.attend(x_bsd, batch)?).context("Block")?;
        let out_bsd = self.feed_forward.forward(&self.ffn_norm.normalize(&x_bsd)?)?;
        x_bsd.f_add(&out_bsd).context("Block")
    }

    fn parameters(&self) -> Vec<Parameter> {
        let attention = self.qkv.projections().iter().chain(self.wo.projections());
        let mut parameters: Vec<_> = attention.map(|projection| projection.weight.clone()).collect();
        parameters.extend(self.feed_forward.parameters());
        parameters.extend([self.attention_norm.weight().clone(), self.ffn_norm.weight().clone()]);
        parameters
    }

    fn seams(&mut self) -> Vec<(String, Seam<'_>)> {
        let name = &self.name;
        let mut seams = vec![
            (format!("{name}.attention.wqkv"), Seam::Linear(&mut self.qkv)),
            (format!("{name}.attention"), Seam::Attention(&mut self.attention)),
            (format!("{name}.attention.wo"), Seam::Linear(&mut self.wo)),
        ];
        seams.extend(self.feed_forward.seams());
        seams
    }
}
