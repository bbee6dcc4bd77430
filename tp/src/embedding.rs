//! A table of token vectors split by tokens.

use ferrotitan_nn::{Batch, Error, Layer, Parameter, Result};
use tch::{Device, Tensor};

use crate::crossing::Residual;
use crate::error::Context as _;
use crate::shares::share;

/// Every rank looks up the tokens of its share of the vocabulary; the others' vectors are zero until the sum.
#[derive(Debug)]
pub(crate) struct VocabularyEmbedding {
    weight: Parameter,
    residual: Residual,
}

impl VocabularyEmbedding {
    pub(crate) fn new(weight: Parameter, residual: Residual) -> Self {
        Self { weight, residual }
    }
}

impl Layer for VocabularyEmbedding {
    /// Token ids `[batch, sequence]` in, the residual stream out.
    fn forward(&mut self, tokens: &Tensor, _batch: &Batch) -> Result<Tensor> {
        let (_, sequence) = tokens.size2().context("embedding")?;
        let vocabulary = self.weight.layout().shape()[0];
        check_ids(tokens, vocabulary, None)?;
        let group = self.residual.group();
        let own = share(vocabulary, group.rank(), group.size());
        let partial = lookup(&self.weight.value()?, tokens, own.start as i64).context("embedding")?;
        self.residual.set_length(sequence);
        self.residual.crossing().leave_autograd(&partial)
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.weight.clone()]
    }
}

/// The rows of `table`, of which the first is that of the token `start`; zeros for tokens outside it.
fn lookup(table: &Tensor, tokens: &Tensor, start: i64) -> Result<Tensor, tch::TchError> {
    let (rows, features) = table.size2()?;
    if rows == 0 {
        // A sum over no rows is zero, and ties the table into the graph like any other rank's.
        let zero = table.f_sum_dim_intlist(0, false, table.kind())?;
        return zero.f_expand([&tokens.size()[..], &[features]].concat(), false);
    }
    let local = tokens.f_sub_scalar(start)?;
    let elsewhere = local.f_lt(0)?.f_logical_or(&local.f_ge(rows)?)?;
    let vectors = Tensor::f_embedding(table, &local.f_masked_fill(&elsewhere, 0)?, -1, false, false)?;
    vectors.f_masked_fill(&elsewhere.f_unsqueeze(-1)?, 0.0)
}

/// Refuses ids outside the vocabulary, which no rank would find in its share. On the CPU alone: a GPU would have to wait.
pub(crate) fn check_ids(ids: &Tensor, vocabulary: usize, ignored: Option<i64>) -> Result<()> {
    if ids.device() != Device::Cpu || ids.numel() == 0 {
        return Ok(());
    }
    let bad = (|| {
        let outside = ids.f_lt(0)?.f_logical_or(&ids.f_ge(vocabulary as i64)?)?;
        match ignored {
            Some(ignored) => outside.f_logical_and(&ids.f_ne(ignored)?),
            None => Ok(outside),
        }
    })();
    let bad = ids.masked_select(&bad.context("token ids")?);
    match bad.numel() {
        0 => Ok(()),
        count => Err(Error::Shape {
            module: "vocabulary",
            got: format!("{count} token ids outside it, the first of them {}", bad.int64_value(&[0])),
            expected: format!("ids from 0 to {}", vocabulary as i64 - 1),
        }),
    }
}
