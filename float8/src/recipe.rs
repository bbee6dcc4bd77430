//! Which operand of which product is cast how.

use std::fmt;
use std::str::FromStr;

use ferrotitan_nn::Activation;

use crate::{Error, Format};

/// How a projection's three products are computed, by TorchTitan's names.
///
/// | recipe | `y = x wᵀ` | `dx = dy w` | `dw = dyᵀ x` |
/// |---|---|---|---|
/// | `tensorwise` | E4M3, E4M3 | E5M2, E4M3 | E5M2, E4M3 |
/// | `rowwise` | E4M3, E4M3 | E4M3, E4M3 | E4M3, E4M3 |
/// | `rowwise_with_gw_hp` | E4M3, E4M3 | E4M3, E4M3 (one scale) | not cast |
/// | `mxfp8` | E4M3, E4M3 | E4M3, E4M3 | E4M3, E4M3 |
///
/// `tensorwise` has a scale for a tensor; `rowwise` one, a power of two, for each vector that a product sums over;
/// `mxfp8` one, a power of two in E8M0, for 32 neighbours in such a vector. The recipes by rows and blocks cast an operand
/// anew for each product, since products sum over different axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Recipe {
    /// One scale a tensor.
    #[default]
    Tensorwise,
    /// One scale a vector that is summed over.
    Rowwise,
    /// The same, with the weight gradient in the operands' own dtype.
    RowwiseWithGwHp,
    /// One scale for 32 elements.
    Mxfp8,
}

/// What a product multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// `x` `[tokens, in]`.
    Input,
    /// `w` `[out, in]`.
    Weight,
    /// `dy` `[tokens, out]`.
    Gradient,
}

impl From<Activation> for Operand {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Input => Operand::Input,
            Activation::Gradient => Operand::Gradient,
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Operand::Input => "the input",
            Operand::Weight => "the weight",
            Operand::Gradient => "the gradient of the output",
        })
    }
}

/// What an axis of an operand counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    Tokens,
    In,
    Out,
}

impl Operand {
    pub(crate) const ALL: [Operand; 3] = [Operand::Input, Operand::Weight, Operand::Gradient];

    /// Its two axes, in order.
    pub(crate) const fn axes(self) -> [Axis; 2] {
        match self {
            Operand::Input => [Axis::Tokens, Axis::In],
            Operand::Weight => [Axis::Out, Axis::In],
            Operand::Gradient => [Axis::Tokens, Axis::Out],
        }
    }
}

/// One of the three products of a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Product {
    Output,
    InputGradient,
    WeightGradient,
}

impl Product {
    /// What it multiplies.
    pub(crate) const fn operands(self) -> [Operand; 2] {
        match self {
            Product::Output => [Operand::Input, Operand::Weight],
            Product::InputGradient => [Operand::Gradient, Operand::Weight],
            Product::WeightGradient => [Operand::Gradient, Operand::Input],
        }
    }

    /// What it sums over.
    pub(crate) const fn summed(self) -> Axis {
        match self {
            Product::Output => Axis::In,
            Product::InputGradient => Axis::Out,
            Product::WeightGradient => Axis::Tokens,
        }
    }
}

/// What shares a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    Tensor,
    Rows,
    Blocks,
}

impl Recipe {
    /// Every recipe.
    pub const ALL: [Recipe; 4] = [Recipe::Tensorwise, Recipe::Rowwise, Recipe::RowwiseWithGwHp, Recipe::Mxfp8];

    /// Its name in configs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Recipe::Tensorwise => "tensorwise",
            Recipe::Rowwise => "rowwise",
            Recipe::RowwiseWithGwHp => "rowwise_with_gw_hp",
            Recipe::Mxfp8 => "mxfp8",
        }
    }

    /// Of what both widths of a projection must be multiples.
    #[must_use]
    pub const fn multiple(self) -> usize {
        match self {
            Recipe::Mxfp8 => crate::BLOCK as usize,
            _ => 16,
        }
    }

    /// Whether scales are powers of two unless somebody asks for it.
    pub(crate) const fn has_powers_of_two(self) -> bool {
        !matches!(self, Recipe::Tensorwise)
    }

    /// The format of an operand that every product of it has alike, with one scale; none where products differ.
    pub(crate) const fn whole(self, operand: Operand) -> Option<Format> {
        match (self, operand) {
            (Recipe::Tensorwise, Operand::Input | Operand::Weight) => Some(Format::E4m3),
            (Recipe::Tensorwise, Operand::Gradient) => Some(Format::E5m2),
            _ => None,
        }
    }

    /// How the operands of a product are cast; none where they are not.
    pub(crate) const fn casts(self, product: Product) -> Option<[(Format, Sharing); 2]> {
        use Format::{E4m3, E5m2};
        use Sharing::{Blocks, Rows, Tensor};
        Some(match (self, product) {
            (Recipe::Tensorwise, Product::Output) => [(E4m3, Tensor), (E4m3, Tensor)],
            (Recipe::Tensorwise, _) => [(E5m2, Tensor), (E4m3, Tensor)],
            (Recipe::RowwiseWithGwHp, Product::WeightGradient) => return None,
            (Recipe::RowwiseWithGwHp, Product::InputGradient) => [(E4m3, Rows), (E4m3, Tensor)],
            (Recipe::Rowwise | Recipe::RowwiseWithGwHp, _) => [(E4m3, Rows), (E4m3, Rows)],
            (Recipe::Mxfp8, _) => [(E4m3, Blocks), (E4m3, Blocks)],
        })
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Recipe {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Recipe::ALL.into_iter().find(|recipe| recipe.name() == text);
        found.ok_or_else(|| Error::NoSuchRecipe { text: text.to_owned() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_whole_is_cast_alike_by_every_product() {
        let products = [Product::Output, Product::InputGradient, Product::WeightGradient];
        for (recipe, operand) in Recipe::ALL.into_iter().flat_map(|recipe| Operand::ALL.map(|of| (recipe, of))) {
            let cast = |product: Product| {
                let place = product.operands().into_iter().position(|of| of == operand)?;
                Some(recipe.casts(product).map(|casts| casts[place]))
            };
            let casts: Vec<_> = products.into_iter().filter_map(cast).collect();
            let alike = casts[0].filter(|(_, sharing)| *sharing == Sharing::Tensor && casts[0] == casts[1]);
            assert_eq!(recipe.whole(operand), alike.map(|(format, _)| format), "{recipe}, {operand}");
        }
    }
}
