//! Products that are too small for eight bits.

use crate::Recipe;

/// By recipe, the least widths `(inputs, outputs)` at which casting costs less than half as much as the products it
/// serves, each with the other width at 256: measured by `benches/casts.rs`, forward and backward, 512 tokens, one core.
const LEAST: [(Recipe, usize); 4] =
    [(Recipe::Tensorwise, 128), (Recipe::Rowwise, 256), (Recipe::RowwiseWithGwHp, 192), (Recipe::Mxfp8, 512)];

/// Whether a projection is so small that its casts cost more than its products in eight bits can save.
pub(crate) fn costs_more_than_it_saves(recipe: Recipe, inputs: usize, outputs: usize) -> bool {
    LEAST.iter().any(|&(of, least)| of == recipe && inputs.min(outputs) < least)
}
