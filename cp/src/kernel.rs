//! Attention of one block, with the log-sum-exp that lets blocks be merged.
//!
//! Shape suffixes: b batch, h query heads, g key-value heads, n query heads a key-value head (h = g n), s queries, t keys,
//! k features of a head.

use tch::{Device, Kind, TchError, Tensor};

type Torch<T> = std::result::Result<T, TchError>;

/// fp32, or fp64 for fp64: in what partial results are merged and gradients added.
pub(crate) fn accumulate_in(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// The output `[b, h, s, k]` in the dtype of `q_bhsk`, and the log-sum-exp of the scaled scores `[b, h, s]` in fp32 (fp64
/// for fp64), of queries that each see at least one key.
pub(crate) fn forward(q_bhsk: &Tensor, k_bgtk: &Tensor, v_bgtk: &Tensor, causal: bool) -> Torch<(Tensor, Tensor)> {
    if q_bhsk.device() == Device::Cpu {
        return Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
            q_bhsk,
            k_bgtk,
            v_bgtk,
            0.0,
            causal,
            None::<&Tensor>,
            None,
        );
    }
    forward_by_products(q_bhsk, k_bgtk, v_bgtk, causal)
}

/// The gradients of a block's queries, keys and values, in their dtype.
///
/// `out_bhsk` and `lse_bhs` are those of the queries' whole attention, merged over all blocks: with them the weights of
/// this block's keys are exp(scores - lse), and the row sums of the softmax's backward, of `grad` times `out`, are the
/// whole's. So the gradients of all blocks add up to those of the whole.
pub(crate) fn backward(
    grad_bhsk: &Tensor,
    q_bhsk: &Tensor,
    k_bgtk: &Tensor,
    v_bgtk: &Tensor,
    out_bhsk: &Tensor,
    lse_bhs: &Tensor,
    causal: bool,
) -> Torch<(Tensor, Tensor, Tensor)> {
    if q_bhsk.device() == Device::Cpu {
        return Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
            grad_bhsk,
            q_bhsk,
            k_bgtk,
            v_bgtk,
            out_bhsk,
            lse_bhs,
            0.0,
            causal,
            None::<&Tensor>,
            None,
        );
    }
    backward_by_products(grad_bhsk, q_bhsk, k_bgtk, v_bgtk, out_bhsk, lse_bhs, causal)
}

/// At most so many scores are held at a time where libtorch has no kernel with the interface that is needed here.
const SCORES: i64 = 1 << 25;

/// [`forward`] by matrix products, some queries at a time.
fn forward_by_products(q_bhsk: &Tensor, k_bgtk: &Tensor, v_bgtk: &Tensor, causal: bool) -> Torch<(Tensor, Tensor)> {
    let kind = accumulate_in(q_bhsk.kind());
    let (k, v) = (keys(k_bgtk, kind)?, keys(v_bgtk, kind)?);
    let mut outs = Vec::new();
    let mut sums = Vec::new();
    for (start, length) in slabs(q_bhsk, k_bgtk) {
        let q = by_group(&q_bhsk.f_narrow(2, start, length)?.f_to_kind(kind)?, k_bgtk)?;
        let scores = scores(&q, &k, start, causal)?;
        let lse = scores.f_logsumexp([-1_i64].as_slice(), true)?;
        outs.push(scores.f_sub(&lse)?.f_exp()?.f_matmul(&v)?.f_flatten(1, 2)?);
        sums.push(lse.f_squeeze_dim(-1)?.f_flatten(1, 2)?);
    }
    Ok((Tensor::f_cat(&outs, 2)?.f_to_kind(q_bhsk.kind())?, Tensor::f_cat(&sums, 2)?))
}

/// [`backward`] by matrix products, some queries at a time.
fn backward_by_products(
    grad_bhsk: &Tensor,
    q_bhsk: &Tensor,
    k_bgtk: &Tensor,
    v_bgtk: &Tensor,
    out_bhsk: &Tensor,
    lse_bhs: &Tensor,
    causal: bool,
) -> Torch<(Tensor, Tensor, Tensor)> {
    let kind = accumulate_in(q_bhsk.kind());
    let (k, v) = (keys(k_bgtk, kind)?, keys(v_bgtk, kind)?);
    let (mut dk, mut dv) = (k.f_zeros_like()?, v.f_zeros_like()?);
    let mut dqs = Vec::new();
    for (start, length) in slabs(q_bhsk, k_bgtk) {
        let slab = |x: &Tensor| by_group(&x.f_narrow(2, start, length)?.f_to_kind(kind)?, k_bgtk);
        let (q, grad, out) = (slab(q_bhsk)?, slab(grad_bhsk)?, slab(out_bhsk)?);
        let lse = slab(&lse_bhs.f_unsqueeze(-1)?)?;
        let p = scores(&q, &k, start, causal)?.f_sub(&lse)?.f_exp()?;
        let row_sums = grad.f_mul(&out)?.f_sum_dim_intlist([-1_i64].as_slice(), true, kind)?;
        let ds = grad.f_matmul(&v.f_transpose(-1, -2)?)?.f_sub(&row_sums)?.f_mul(&p)?.f_mul_scalar(scale(&q))?;
        dqs.push(ds.f_matmul(&k)?.f_flatten(1, 2)?);
        // The query heads of a group share its keys, whose gradient is the sum over them.
        let over_group = |x: Tensor| x.f_sum_dim_intlist([2_i64].as_slice(), true, kind);
        let _ = dk.f_add_(&over_group(ds.f_transpose(-1, -2)?.f_matmul(&q)?)?)?;
        let _ = dv.f_add_(&over_group(p.f_transpose(-1, -2)?.f_matmul(&grad)?)?)?;
    }
    let keys_kind = |x: Tensor| x.f_squeeze_dim(2)?.f_to_kind(k_bgtk.kind());
    Ok((Tensor::f_cat(&dqs, 2)?.f_to_kind(q_bhsk.kind())?, keys_kind(dk)?, keys_kind(dv)?))
}

/// Where each slab of queries begins, and how many it has.
fn slabs(q_bhsk: &Tensor, k_bgtk: &Tensor) -> Vec<(i64, i64)> {
    let (q, keys) = (q_bhsk.size(), k_bgtk.size()[2]);
    let length = (SCORES / (q[0] * q[1] * keys).max(1)).max(1);
    (0..q[2]).step_by(length as usize).map(|start| (start, length.min(q[2] - start))).collect()
}

/// `[b, g, 1, t, k]`, for products with all query heads of a group.
fn keys(x_bgtk: &Tensor, kind: Kind) -> Torch<Tensor> {
    x_bgtk.f_to_kind(kind)?.f_unsqueeze(2)
}

/// `[b, h, …]` as `[b, g, n, …]`.
fn by_group(x: &Tensor, k_bgtk: &Tensor) -> Torch<Tensor> {
    let (size, groups) = (x.size(), k_bgtk.size()[1]);
    let mut shape = vec![size[0], groups, size[1] / groups];
    shape.extend(&size[2..]);
    x.f_reshape(shape)
}

fn scale(q: &Tensor) -> f64 {
    (q.size().last().copied().unwrap_or(1) as f64).sqrt().recip()
}

/// Scaled scores `[b, g, n, s, t]` of the queries from number `start` on; minus infinity where a query does not see a key.
fn scores(q: &Tensor, k: &Tensor, start: i64, causal: bool) -> Torch<Tensor> {
    let scores = q.f_matmul(&k.f_transpose(-1, -2)?)?.f_mul_scalar(scale(q))?;
    if !causal {
        return Ok(scores);
    }
    let size = scores.size();
    let hidden = Tensor::f_ones([size[3], size[4]], (Kind::Bool, q.device()))?.f_triu(start + 1)?;
    scores.f_masked_fill(&hidden, f64::NEG_INFINITY)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn products_equal_the_flash_kernel() {
        tch::manual_seed(1);
        for (heads, groups, queries, keys_seen, causal) in
            [(4, 2, 7, 7, true), (6, 2, 5, 9, false), (3, 3, 1, 1, true), (8, 1, 3, 2, false)]
        {
            let random = |h, s| Tensor::randn([2, h, s, 8], (Kind::Double, Device::Cpu));
            let (q, k, v) = (random(heads, queries), random(groups, keys_seen), random(groups, keys_seen));
            let (out, lse) = forward(&q, &k, &v, causal).unwrap();
            let (out_p, lse_p) = forward_by_products(&q, &k, &v, causal).unwrap();
            let close = |a: &Tensor, b: &Tensor| {
                assert_eq!(a.size(), b.size());
                let difference = (a - b).abs().max().double_value(&[]);
                assert!(difference < 1e-13, "{difference}");
            };
            close(&out, &out_p);
            close(&lse, &lse_p);
            // Of a whole that this block is part of: any log-sum-exp at least as large.
            let (lse, grad) = (&lse + 0.5, random(heads, queries));
            let (a, b, c) = backward(&grad, &q, &k, &v, &out, &lse, causal).unwrap();
            let (a_p, b_p, c_p) = backward_by_products(&grad, &q, &k, &v, &out, &lse, causal).unwrap();
            close(&a, &a_p);
            close(&b, &b_p);
            close(&c, &c_p);
        }
    }
}
