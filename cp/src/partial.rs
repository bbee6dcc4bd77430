//! Attention of a rank's queries, merged from blocks as their keys arrive.
//!
//! Shape suffixes as in `kernel`.

use std::ops::Range;

use tch::Tensor;

use crate::blocks::Block;
use crate::error::Context as _;
use crate::kernel::{self, accumulate_in};
use crate::{Plan, Result};

/// Keys and values of one source, each `[b, g, t, k]`.
#[derive(Debug)]
pub(crate) struct Keys {
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
}

/// Outputs of queries that have met some of their keys.
#[derive(Debug)]
pub(crate) struct Outputs {
    /// `[b, h, s, k]`, laid out as `[b, s, h, k]`; in fp32 (fp64 for fp64), since it is merged many times.
    out: Tensor,
    /// `[b, h, s]`.
    lse: Tensor,
}

impl Outputs {
    pub(crate) fn new(q_bhsk: &Tensor) -> Result<Self> {
        let size = q_bhsk.size();
        let options = (accumulate_in(q_bhsk.kind()), q_bhsk.device());
        let out = Tensor::f_empty([size[0], size[2], size[1], size[3]], options);
        let out = out.and_then(|out| out.f_transpose(1, 2)).context("attention")?;
        let lse = Tensor::f_empty(&size[..3], options).context("attention")?;
        Ok(Self { out, lse })
    }

    /// Lets the queries meet the keys of one source. A rank's own keys must come first.
    pub(crate) fn attend(&mut self, q_bhsk: &Tensor, keys: &Keys, plan: &Plan, source: usize) -> Result<()> {
        if q_bhsk.size()[1] == 0 {
            return Ok(());
        }
        for (rows, block) in plan.blocks(source) {
            self.merge(q_bhsk, keys, rows, block).context("attention")?;
        }
        Ok(())
    }

    /// With l the log-sum-exp of the block's scores and L that so far: out += sigmoid(l - L) (block's out - out),
    /// L = log(exp L + exp l).
    fn merge(&mut self, q: &Tensor, keys: &Keys, rows: &Range<i64>, block: &Block) -> Result<(), tch::TchError> {
        let (k, v) = (cut(&keys.k, rows, &block.keys)?, cut(&keys.v, rows, &block.keys)?);
        let (out, lse) = kernel::forward(&cut(q, rows, &block.queries)?, &k, &v, block.causal)?;
        let mut merged = cut(&self.out, rows, &block.queries)?;
        let mut merged_lse = cut(&self.lse, rows, &block.queries)?;
        if block.first {
            merged.f_copy_(&out)?;
            return merged_lse.f_copy_(&lse);
        }
        let weight = lse.f_sub(&merged_lse)?.f_sigmoid()?.f_unsqueeze(-1)?;
        let _ = merged.f_lerp_tensor_(&out.f_to_kind(merged.kind())?, &weight)?;
        merged_lse.f_copy_(&merged_lse.f_logaddexp(&lse)?)
    }

    /// The outputs `[b, h, s, k]` in the dtype of `q`, and the log-sum-exp of each query's scores `[b, h, s]`.
    pub(crate) fn finish(self, q_bhsk: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((self.out.f_to_kind(q_bhsk.kind()).context("attention")?, self.lse))
    }
}

/// What the gradients of a rank's queries are computed from; all `[b, h, s, k]` but `lse`, `[b, h, s]`.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub(crate) grad: Tensor,
    pub(crate) q: Tensor,
    pub(crate) out: Tensor,
    pub(crate) lse: Tensor,
    /// The gradient of `q`, in fp32 (fp64 for fp64).
    dq: Tensor,
}

impl Gradients {
    pub(crate) fn new(grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Result<Self> {
        let size = q.size();
        let dq = Tensor::f_zeros([size[0], size[2], size[1], size[3]], (accumulate_in(q.kind()), q.device()));
        let dq = dq.and_then(|dq| dq.f_transpose(1, 2)).context("attention's backward")?;
        Ok(Self { grad, q, out, lse, dq })
    }

    /// Adds the gradients of the keys of one source to `sums`, and those of the queries to this.
    pub(crate) fn attend(&mut self, keys: &Keys, sums: &mut Keys, plan: &Plan, source: usize) -> Result<()> {
        if self.q.size()[1] == 0 {
            return Ok(());
        }
        for (rows, block) in plan.blocks(source) {
            self.add(keys, sums, rows, block).context("attention's backward")?;
        }
        Ok(())
    }

    fn add(&mut self, keys: &Keys, sums: &mut Keys, rows: &Range<i64>, block: &Block) -> Result<(), tch::TchError> {
        let queries = |x: &Tensor| cut(x, rows, &block.queries);
        let (dq, dk, dv) = kernel::backward(
            &queries(&self.grad)?,
            &queries(&self.q)?,
            &cut(&keys.k, rows, &block.keys)?,
            &cut(&keys.v, rows, &block.keys)?,
            &queries(&self.out)?,
            &queries(&self.lse)?,
            block.causal,
        )?;
        let _ = queries(&self.dq)?.f_add_(&dq)?;
        let _ = cut(&sums.k, rows, &block.keys)?.f_add_(&dk)?;
        let _ = cut(&sums.v, rows, &block.keys)?.f_add_(&dv)?;
        Ok(())
    }

    /// The gradient of the queries, `[b, h, s, k]` laid out as `[b, s, h, k]`, in fp32 (fp64 for fp64).
    pub(crate) fn finish(self) -> Tensor {
        self.dq
    }
}

/// Some rows of the batch and some tokens of `[b, heads, tokens, …]`, as a view.
fn cut(x: &Tensor, rows: &Range<i64>, tokens: &Range<i64>) -> Result<Tensor, tch::TchError> {
    x.f_narrow(0, rows.start, rows.end - rows.start)?.f_narrow(2, tokens.start, tokens.end - tokens.start)
}
