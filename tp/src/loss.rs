//! Cross-entropy of logits split by the vocabulary, which never lie whole on any rank (Shoeybi et al. 2019).

use ferrotitan_comm::{Group, ReduceOp};
use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_nn::{Error, IGNORE_INDEX, Linear, Loss, Result, loss_by_chunk};
use tch::{Kind, Tensor};

use crate::crossing::Residual;
use crate::embedding::check_ids;
use crate::error::{Context as _, carried};
use crate::shares::share;

/// The sum of the cross-entropies of `tokens` tokens, the same on every rank of `group`: a scalar in the dtype of
/// `logits`, differentiable in them.
///
/// `logits` `[tokens, own]`, fp32 or fp64, are those of this rank's balanced share of the `vocabulary` (as
/// `mesh::Parts::Even` deals it). `labels` `[tokens]`, int64, are the same on every rank; [`IGNORE_INDEX`] has no loss.
/// Forward sends three numbers a token in all-reduces: the maximum, the label's logit and the sum of exponentials.
/// Backward sends nothing.
///
/// # Errors
/// When the shapes do not fit, a label lies outside the vocabulary (noticed on the CPU), or a collective fails.
pub fn vocabulary_cross_entropy(logits: &Tensor, labels: &Tensor, vocabulary: usize, group: &Group) -> Result<Tensor> {
    let own = share(vocabulary, group.rank(), group.size());
    if logits.size() != [labels.numel() as i64, own.len() as i64] || labels.dim() != 1 {
        return Err(Error::Shape {
            module: "vocabulary cross-entropy",
            got: format!("logits {:?} and labels {:?}", logits.size(), labels.size()),
            expected: format!("[tokens, {}] and [tokens]", own.len()),
        });
    }
    check_ids(labels, vocabulary, Some(IGNORE_INDEX))?;
    let start = own.start as i64;
    let mut outputs =
        autograd::apply(CrossEntropy { labels: labels.shallow_clone(), start, group: group.clone() }, &[logits])?;
    outputs.pop().ok_or_else(|| Error::Config("the loss gave no output".into()))
}

struct CrossEntropy {
    labels: Tensor,
    /// The token of the first of this rank's logits.
    start: i64,
    group: Group,
}

impl CrossEntropy {
    /// The sum of the losses, and its gradient in the logits.
    fn compute(&self, logits: &Tensor) -> Result<(Tensor, Tensor)> {
        let (tokens, own) = logits.size2().context("loss")?;
        let reduce = |tensor: &Tensor, how| self.group.all_reduce_start(tensor, how).map_err(carried("loss"));
        let highest = match own {
            0 => Tensor::f_full([tokens], f64::NEG_INFINITY, (logits.kind(), logits.device())),
            _ => logits.f_amax(1, false),
        };
        let highest = reduce(&highest.context("loss")?, ReduceOp::Max)?;
        // The label's logit is one rank's; it travels under the maximum.
        let label = self.labels.f_sub_scalar(self.start).context("loss")?;
        let here = label.f_ge(0).and_then(|from| from.f_logical_and(&label.f_lt(own)?)).context("loss")?;
        let index =
            label.f_masked_fill(&here.logical_not(), 0).and_then(|label| label.f_unsqueeze(1)).context("loss")?;
        let picked = match own {
            0 => Tensor::f_zeros([tokens], (logits.kind(), logits.device())),
            _ => logits
                .f_gather(1, &index, false)
                .and_then(|z| z.f_squeeze_dim(1)?.f_masked_fill(&here.logical_not(), 0.0)),
        };
        let picked = reduce(&picked.context("loss")?, ReduceOp::Sum)?;

        let highest = highest.wait().map_err(carried("loss"))?;
        let mut gradient = logits.f_sub(&highest.unsqueeze(1)).and_then(|mut z| z.f_exp_()).context("loss")?;
        let sum = gradient.f_sum_dim_intlist(1, false, logits.kind()).context("loss")?;
        let sum = reduce(&sum, ReduceOp::Sum)?.wait().map_err(carried("loss"))?;
        let picked = picked.wait().map_err(carried("loss"))?;

        let finish = || {
            let ignored = self.labels.f_eq(IGNORE_INDEX)?;
            // The difference of the two large numbers first: it is exact where they are near.
            let losses = highest.f_sub(&picked)?.f_add(&sum.f_log()?)?.f_masked_fill(&ignored, 0.0)?;
            gradient = gradient.f_div_(&sum.f_unsqueeze(1)?)?;
            if own > 0 {
                let one = here.f_to_kind(logits.kind())?.f_neg()?.f_unsqueeze(1)?;
                gradient = gradient.f_scatter_add_(1, &index, &one)?;
            }
            gradient = gradient.f_masked_fill_(&ignored.f_unsqueeze(1)?, 0.0)?;
            Ok((losses.f_sum(logits.kind())?, gradient))
        };
        finish().context("loss")
    }
}

impl Function for CrossEntropy {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        let (loss, gradient) = self.compute(&inputs[0])?;
        context.save(&[gradient]);
        Ok(vec![loss])
    }

    fn backward(
        &mut self,
        context: &mut Context,
        upstream: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, BoxError> {
        let Some(Some(scale)) = upstream.into_iter().next() else { return Ok(vec![None]) };
        Ok(vec![Some(context.saved()?[0].f_mul(&scale)?)])
    }
}

/// The loss seam over a head split by the vocabulary, a chunk of tokens at a time.
#[derive(Debug)]
pub(crate) struct VocabularyCrossEntropy {
    residual: Residual,
    /// How many logits a rank holds at most. At least one token's are.
    logits: usize,
}

impl VocabularyCrossEntropy {
    pub(crate) fn new(residual: Residual, logits: usize) -> Self {
        Self { residual, logits }
    }
}

impl Loss for VocabularyCrossEntropy {
    fn forward(&mut self, hidden: &Tensor, head: &dyn Linear, labels: &Tensor) -> Result<Tensor> {
        let (hidden, projections) = self.residual.crossing().enter_for(hidden, head.projections())?;
        let [projection] = projections.as_slice() else {
            return Err(Error::Shape {
                module: "vocabulary cross-entropy",
                got: format!("{} projections", projections.len()),
                expected: "1".into(),
            });
        };
        let vocabulary = projection.weight.layout().shape()[0];
        let group = self.residual.group();
        // By the largest share, so that all ranks cut the same chunks.
        let chunk = self.logits / vocabulary.div_ceil(group.size()).max(1);
        loss_by_chunk(&hidden, head, labels, chunk, |hidden, labels| {
            let logits = projection.forward(hidden)?;
            let kind = if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float };
            vocabulary_cross_entropy(&logits.f_to_kind(kind).context("loss")?, labels, vocabulary, group)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use ferrotitan_comm::{Op, threads};
    use ferrotitan_mesh::rng::Distribution;
    use ferrotitan_mesh::{Degrees, Grid, Mesh, Parts, View};
    use ferrotitan_nn::{ChunkedCrossEntropy, Parameter, Plain, Projection};
    use proptest::prelude::*;
    use tch::Device;

    use super::*;

    const DIM: usize = 6;

    fn head(vocabulary: usize, mesh: &dyn Mesh) -> Plain {
        let projection = Projection::new("output", DIM, vocabulary, Distribution::Normal { mean: 0.0, std: 0.5 });
        let layout = projection.weight.layout().shard(View::TP, 0, Parts::Even).unwrap();
        projection.weight.set_layout(layout);
        projection.weight.materialize(1, Kind::Double, Device::Cpu, mesh).unwrap();
        Plain::new(vec![projection])
    }

    fn hidden(seed: u64, shape: &[usize]) -> Tensor {
        let parameter = Parameter::new("x", shape, Distribution::Normal { mean: 0.0, std: 3.0 });
        parameter.materialize(seed, Kind::Double, Device::Cpu, &Grid::single()).unwrap();
        parameter.local().unwrap().detach().set_requires_grad(true)
    }

    /// The loss, and the gradients of the hidden states and of the head's weight.
    fn run(loss: &mut dyn Loss, hidden: &Tensor, head: &Plain, labels: &Tensor) -> [Tensor; 3] {
        let sum = loss.forward(hidden, head, labels).unwrap();
        (&sum * 0.25).backward();
        let weight = head.projections()[0].weight.gradient().unwrap().unwrap();
        [sum.detach(), hidden.grad().copy(), weight.copy()]
    }

    fn close(ours: &Tensor, theirs: &Tensor) -> bool {
        ours.size() == theirs.size() && (ours.numel() == 0 || (ours - theirs).abs().max().double_value(&[]) < 1e-11)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Chunk by chunk, over any number of ranks, some of which may hold no token.
        #[test]
        fn split_logits_give_the_loss_of_whole_ones(
            (rows, sequence) in (1_usize..3, 1_usize..9), vocabulary in 1_usize..30, held in 1_usize..60,
            tp in 1_usize..6, sequence_parallel: bool, seed: u64,
        ) {
            let tokens = (rows * sequence) as i64;
            let make_labels = || {
                let labels = (Tensor::arange(tokens, (Kind::Int64, Device::Cpu)) * 7 + 3).remainder(vocabulary as i64);
                let labels = labels.masked_fill(&Tensor::arange(tokens, (Kind::Int64, Device::Cpu)).remainder(4).eq(1), IGNORE_INDEX);
                labels.view([rows as i64, sequence as i64])
            };
            let shape = [rows, sequence, DIM];
            let whole = head(vocabulary, &Grid::single());
            let expected = run(&mut ChunkedCrossEntropy { logits: held }, &hidden(seed, &shape), &whole, &make_labels());

            let limits = threads::Options { timeout: Duration::from_secs(30), ..threads::Options::default() };
            let ranks = threads::run(Degrees { tp, ..Degrees::default() }, &limits, |mesh| {
                let residual = Residual::new(mesh.group(View::TP)?, sequence_parallel, 1);
                residual.set_length(sequence as i64);
                let own = share(sequence, if sequence_parallel { mesh.rank() } else { 0 }, if sequence_parallel { tp } else { 1 });
                let x = hidden(seed, &shape).detach().narrow(1, own.start as i64, own.len() as i64).set_requires_grad(true);
                let head = head(vocabulary, &mesh);
                let found = run(&mut VocabularyCrossEntropy::new(residual, held), &x, &head, &make_labels());
                let chunk = (held / vocabulary.div_ceil(tp)).max(1);
                let sums = mesh.recorder().events().iter().filter(|event| event.op == Op::AllReduce && event.shape.len() == 1).count();
                let region = head.projections()[0].weight.layout().local_region(&mesh);
                Ok::<_, ferrotitan_comm::Error>((found, own, region.offset[0], sums, (rows * sequence).div_ceil(chunk)))
            });
            for ([loss, dx, dw], own, first, sums, chunks) in ranks.unwrap() {
                prop_assert!(close(&loss, &expected[0]));
                prop_assert!(close(&dx, &expected[1].narrow(1, own.start as i64, own.len() as i64)));
                prop_assert!(close(&dw, &expected[2].narrow(0, first as i64, dw.size()[0])));
                prop_assert_eq!(sums, if tp == 1 { 0 } else { 3 * chunks });
            }
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let group = Group::single(Device::Cpu);
        let logits = Tensor::from_slice(&[1e30_f32, -1e30, 0.0, 88.0, 89.0, 90.0]).view([2, 3]).set_requires_grad(true);
        let labels = Tensor::from_slice(&[0_i64, 2]);
        let loss = vocabulary_cross_entropy(&logits, &labels, 3, &group).unwrap();
        loss.backward();
        let expected = (1.0 + (-1.0_f64).exp() + (-2.0_f64).exp()).ln();
        assert!((loss.double_value(&[]) - expected).abs() < 1e-6);
        assert!(logits.grad().isfinite().all().int64_value(&[]) == 1);
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let group = Group::single(Device::Cpu);
        let logits = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let labels = Tensor::zeros([2], (Kind::Int64, Device::Cpu));
        let message = vocabulary_cross_entropy(&logits, &labels, 4, &group).unwrap_err().to_string();
        assert!(message.contains("[2, 3]") && message.contains("[tokens, 4]"), "{message}");
        let message = vocabulary_cross_entropy(&logits, &(labels + 3), 3, &group).unwrap_err().to_string();
        assert!(message.contains("first of them 3"), "{message}");
    }
}
