//! The seam at the linear layers.

use std::fmt::Debug;
use std::sync::Arc;

use ferrotitan_mesh::rng::Distribution;
use tch::Tensor;

use crate::gemm::{Gemm, Native, project};
use crate::{Parameter, Result};

/// One weight and the products that use it.
#[derive(Debug, Clone)]
pub struct Projection {
    /// `[out, in]`.
    pub weight: Parameter,
    /// How its three products are computed.
    pub gemm: Arc<dyn Gemm>,
}

impl Projection {
    /// A projection from `inputs` to `outputs` features with libtorch's products.
    #[must_use]
    pub fn new(name: &str, inputs: usize, outputs: usize, init: Distribution) -> Self {
        let weight = Parameter::new(format!("{name}.weight"), &[outputs, inputs], init);
        Self { weight, gemm: Arc::new(Native) }
    }

    /// `x wᵀ`, differentiable.
    ///
    /// # Errors
    /// When the weight has no storage or the shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        project(&self.gemm, x, &self.weight.value()?)
    }
}

/// One input and one or several projections of it, none with a bias.
///
/// Projections of one input belong to one `Linear` (`wq`, `wk` and `wv` do), so that whatever has to happen to the input
/// (a gather, a cast) happens once.
pub trait Linear: Debug + Send {
    /// The projections of `x` `[…, in]`, each `[…, out]`, in order.
    ///
    /// # Errors
    /// When a weight has no storage or the shapes do not fit.
    fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>>;

    /// The projections.
    fn projections(&self) -> &[Projection];

    /// The projections, to replace their products, or to build another `Linear` of them.
    fn projections_mut(&mut self) -> &mut Vec<Projection>;
}

/// Computes every projection on this rank.
#[derive(Debug)]
pub struct Plain(Vec<Projection>);

impl Plain {
    /// Of one or several projections of the same input.
    #[must_use]
    pub fn new(projections: Vec<Projection>) -> Self {
        Self(projections)
    }
}

impl Linear for Plain {
    fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        self.0.iter().map(|projection| projection.forward(x)).collect()
    }

    fn projections(&self) -> &[Projection] {
        &self.0
    }

    fn projections_mut(&mut self) -> &mut Vec<Projection> {
        &mut self.0
    }
}
