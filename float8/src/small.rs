//! Products that are too small for eight bits.

use crate::Recipe;

/// By recipe, the least `k n / (k + n)` of a projection of `k` inputs and `n` outputs at which its casts take less than half
/// as long as its three products do without any.
///
/// Casts grow with `k` and `n`, products with both together, hence the quotient. Measured by `benches/casts.rs` (512 tokens,
/// fp32, one core with AVX-512): the quotients at which the half is reached, between widths of 64 and 1024. MX casts, which
/// are emulated, do not reach it there, so that their number is twice the largest that was measured.
const LEAST: [(Recipe, usize); 4] =
    [(Recipe::Tensorwise, 112), (Recipe::Rowwise, 100), (Recipe::RowwiseWithGwHp, 51), (Recipe::Mxfp8, 1024)];

/// Whether a projection is so small that its casts eat up what eight bits could save.
pub(crate) fn costs_more_than_it_saves(recipe: Recipe, inputs: usize, outputs: usize) -> bool {
    let is_below = |least: usize| inputs.saturating_mul(outputs) < least.saturating_mul(inputs + outputs);
    LEAST.iter().any(|&(of, least)| of == recipe && is_below(least))
}
