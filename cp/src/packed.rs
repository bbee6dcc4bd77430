//! Keys and values as they travel: one tensor for both, token by token.
//!
//! Shape suffixes: b batch, t tokens, g key-value heads, k features of a head; 2 is keys and values.

use tch::{Kind, Tensor};

use crate::Result;
use crate::error::Context as _;
use crate::partial::Keys;

/// `k_btgk` and `v_btgk` as one tensor `[t, 2, b, g, k]`. Tokens come first, so that what one rank holds is one piece of
/// memory, whoever gathers it.
pub(crate) fn pack(k_btgk: &Tensor, v_btgk: &Tensor) -> Result<Tensor> {
    let pack = || Tensor::f_stack(&[k_btgk.f_transpose(0, 1)?, v_btgk.f_transpose(0, 1)?], 1);
    pack().context("packing keys and values")
}

/// The same shape of zeros for `tokens` tokens: where gradients are summed.
pub(crate) fn zeros(like: &Tensor, tokens: i64, kind: Kind) -> Result<Tensor> {
    Tensor::f_zeros(shape(like, tokens), (kind, like.device())).context("packing keys and values")
}

/// The shape of as many tokens of another rank.
pub(crate) fn shape(like: &Tensor, tokens: i64) -> Vec<i64> {
    let mut shape = like.size();
    shape[0] = tokens;
    shape
}

/// Views of the keys and values as `[b, g, t, k]`.
pub(crate) fn views(packed: &Tensor) -> Result<Keys> {
    let part = |index| packed.f_select(1, index)?.f_permute([1, 2, 0, 3]);
    let views = || Ok(Keys { k: part(0)?, v: part(1)? });
    views().context("unpacking keys and values")
}

/// Keys and values `[b, t, g, k]` of their own, in the given dtype.
pub(crate) fn unpack(packed: &Tensor, kind: Kind) -> Result<(Tensor, Tensor)> {
    let part = |index| packed.f_select(1, index)?.f_transpose(0, 1)?.f_to_kind(kind);
    let unpack = || Ok((part(0)?, part(1)?));
    unpack().context("unpacking keys and values")
}
