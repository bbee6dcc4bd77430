//! The sum of the gradients over all ranks that share a loss.

use ferrotitan_comm::{DeviceMesh, ReduceOp};
use ferrotitan_mesh::View;
use ferrotitan_nn::Parameter;
use tch::{Kind, Tensor};

/// Gradients that travel together hold at least so many elements: fewer, larger messages cost less.
const BUCKET: usize = 1 << 22;

/// Replaces each gradient by its sum over the ranks that share the loss, in the dtype `reduce`.
///
/// A sum, not a mean: the loss was divided by the number of tokens of the whole step already.
pub(super) fn reduce(parameters: &[Parameter], reduce: Kind, mesh: &DeviceMesh) -> anyhow::Result<()> {
    let group = mesh.group(View::LOSS)?;
    if group.size() == 1 {
        return Ok(());
    }
    let mut bucket = Vec::new();
    let mut buckets = Vec::new();
    let mut elements = 0;
    for parameter in parameters.iter().filter(|parameter| parameter.is_trainable()) {
        // A parameter that no token of this rank reached still takes part.
        let gradient = match parameter.gradient()? {
            Some(gradient) => gradient,
            None => {
                let zeros = parameter.local()?.detach().zeros_like();
                parameter.set_gradient(zeros.shallow_clone())?;
                zeros
            }
        };
        elements += gradient.numel();
        bucket.push(gradient);
        if elements >= BUCKET {
            buckets.push(std::mem::take(&mut bucket));
            elements = 0;
        }
    }
    buckets.push(bucket);
    tch::no_grad(|| {
        // All buckets are on their way before the first is waited for.
        let mut pending = Vec::new();
        for gradients in buckets.into_iter().filter(|bucket| !bucket.is_empty()) {
            let flat: Vec<Tensor> = gradients.iter().map(|g| g.reshape([-1]).to_kind(reduce)).collect();
            let sum = group.all_reduce_start(&Tensor::cat(&flat, 0), ReduceOp::Sum)?;
            pending.push((gradients, sum));
        }
        for (gradients, sum) in pending {
            let sizes: Vec<i64> = gradients.iter().map(|g| g.numel() as i64).collect();
            let parts = sum.wait()?.split_with_sizes(&sizes, 0);
            for (mut gradient, part) in gradients.into_iter().zip(parts) {
                gradient.copy_(&part.view_as(&gradient));
            }
        }
        Ok(())
    })
}
