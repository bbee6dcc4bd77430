//! The global gradient norm, and clipping by it.

use ferrotitan_comm::{DeviceMesh, ReduceOp};
use ferrotitan_mesh::View;
use ferrotitan_nn::Parameter;
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// Which norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NormKind {
    /// The root of the sum of squares.
    #[default]
    Two,
    /// The largest magnitude.
    Infinity,
}

/// The norm of all gradients of the global model, the same on every rank.
///
/// Each element of each global parameter counts once, whatever the layout: of the ranks that hold it, one contributes.
/// Squares are summed in fp64 within a shard and between ranks. Collective over all ranks of the mesh.
///
/// # Errors
/// When a parameter has no storage, libtorch fails, or a rank fails.
pub fn gradient_norm(parameters: &[Parameter], kind: NormKind, mesh: &DeviceMesh) -> Result<f64> {
    let mut parts = Vec::new();
    for parameter in parameters {
        let Some(gradient) = parameter.gradient()? else { continue };
        if gradient.numel() > 0 && parameter.layout().is_owner(mesh) {
            parts.push(tch::no_grad(|| part(&gradient, kind))?);
        }
    }
    let (local, op) = match kind {
        NormKind::Two => (total(&parts, |all| all.sum(Kind::Double)), ReduceOp::Sum),
        NormKind::Infinity => (total(&parts, Tensor::max), ReduceOp::Max),
    };
    let global = mesh.group(View::WORLD)?.all_reduce_scalar(local, op)?;
    Ok(if kind == NormKind::Two { global.sqrt() } else { global })
}

/// Scales all gradients so that their norm, given as [`gradient_norm`] computed it, is at most `max_norm`. Gives the factor.
///
/// # Errors
/// When a parameter has no storage or libtorch fails.
pub fn clip_gradients(parameters: &[Parameter], norm: f64, max_norm: f64) -> Result<f64> {
    let factor = (max_norm / (norm + 1e-6)).min(1.0);
    if factor < 1.0 {
        for parameter in parameters {
            if let Some(mut gradient) = parameter.gradient()? {
                let _ = tch::no_grad(|| gradient.f_mul_scalar_(factor))
                    .map_err(|source| Error::Torch { context: "clipping", source })?;
            }
        }
    }
    Ok(factor)
}

/// One tensor's part of the norm, an fp64 scalar on its device.
fn part(gradient: &Tensor, kind: NormKind) -> Result<Tensor> {
    let part = match kind {
        // Not libtorch's norm: on a CPU it adds up fp32 squares one after the other and loses the small ones.
        NormKind::Two => gradient.f_mul(gradient).and_then(|squares| squares.f_sum(Kind::Double)),
        NormKind::Infinity => gradient.f_abs().and_then(|a| a.f_max()).and_then(|max| max.f_to_kind(Kind::Double)),
    };
    part.map_err(|source| Error::Torch { context: "gradient norm", source })
}

/// All parts on the host, with one transfer.
fn total(parts: &[Tensor], combine: impl Fn(&Tensor) -> Tensor) -> f64 {
    if parts.is_empty() { 0.0 } else { combine(&Tensor::stack(parts, 0)).double_value(&[]) }
}
