//! What is to be done with each parameter, as a table.

use globset::{Glob, GlobMatcher};

use ferrotitan_nn::llama::LlamaConfig;

use crate::{Error, Heads, Result};

/// What tensor parallelism makes of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A projection's weight `[out, in]`, split by its outputs: whole sequences in, a part of the features out.
    Column,
    /// A projection's weight `[out, in]`, split by its inputs: a part of the features in, sums over the ranks out.
    Row,
    /// As [`Style::Column`], with whole heads to each rank: queries, keys and values.
    ColumnByHeads(Heads),
    /// As [`Style::Row`], with whole heads to each rank: the projection behind attention.
    RowByHeads(Heads),
    /// A table `[vocabulary, features]` split by tokens: of an embedding, of the projection before the loss, or, where
    /// the two are tied, of both.
    Vocabulary,
    /// Whole on every rank, and applied to activations between the split projections: a norm. With sequence parallelism
    /// each rank applies it to its own tokens, and its gradient is summed over the ranks.
    Replicated,
    /// Whole on every rank, and applied between a column-split and a row-split projection, by each rank to its own
    /// features: a norm within each head. Its gradient is always summed over the ranks.
    ReplicatedInside,
}

/// A table from patterns over parameters' full names to styles; of the patterns that match a name, the first decides.
///
/// Patterns are globs: `*` is any text, `?` any character, `{a,b}` either, `[qkv]` any of the three.
#[derive(Debug, Clone)]
pub struct Plan(Vec<(GlobMatcher, Style)>);

impl Plan {
    /// A plan of these entries.
    ///
    /// # Errors
    /// [`Error::Pattern`] for a pattern that is no glob.
    pub fn new<P: AsRef<str>>(entries: impl IntoIterator<Item = (P, Style)>) -> Result<Self> {
        let compiled = entries.into_iter().map(|(pattern, style)| {
            let glob = Glob::new(pattern.as_ref()).map_err(|error| Error::Pattern {
                pattern: pattern.as_ref().into(),
                reason: error.kind().to_string(),
            })?;
            Ok((glob.compile_matcher(), style))
        });
        compiled.collect::<Result<_>>().map(Self)
    }

    /// The plan of [`ferrotitan_nn::llama`].
    #[must_use]
    pub fn llama(config: &LlamaConfig) -> Self {
        let heads = Heads { key_value: config.n_kv_heads, size: config.head_dim() };
        let mut entries = vec![
            ("tok_embeddings.weight", Style::Vocabulary),
            ("layers.*.attention.w[qkv].weight", Style::ColumnByHeads(heads)),
            ("layers.*.attention.wo.weight", Style::RowByHeads(heads)),
            ("layers.*.feed_forward.w[13].weight", Style::Column),
            ("layers.*.feed_forward.w2.weight", Style::Row),
            ("layers.*_norm.weight", Style::Replicated),
            ("norm.weight", Style::Replicated),
        ];
        if !config.tied_embeddings {
            entries.push(("output.weight", Style::Vocabulary));
        }
        Self::new(entries).expect("these patterns are globs")
    }

    /// The entries in order: pattern and style.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&str, Style)> {
        self.0.iter().map(|(pattern, style)| (pattern.glob().glob(), *style))
    }

    /// The style of the parameter of this name, if a pattern matches it.
    #[must_use]
    pub fn style(&self, name: &str) -> Option<Style> {
        self.0.iter().find(|(pattern, _)| pattern.is_match(name)).map(|(_, style)| *style)
    }

    /// Checks the plan against the names of all parameters of the whole model.
    ///
    /// [`TensorParallel`](crate::TensorParallel) does so itself, except where the mesh has pipeline stages, of which it
    /// sees one at a time.
    ///
    /// # Errors
    /// [`Error::NoMatch`] for a pattern that decides no parameter, [`Error::Unplanned`] for a parameter that no pattern
    /// matches.
    pub fn check<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> Result<()> {
        let names: Vec<N> = names.into_iter().collect();
        let mut decides = vec![false; self.0.len()];
        for name in names.iter().map(N::as_ref) {
            let Some(first) = self.0.iter().position(|(pattern, _)| pattern.is_match(name)) else {
                return Err(Error::Unplanned { name: name.into() });
            };
            decides[first] = true;
        }
        match decides.iter().position(|decides| !decides) {
            None => Ok(()),
            Some(idle) => {
                let known: Vec<&str> = names.iter().map(N::as_ref).take(12).collect();
                let more = if names.len() > known.len() { ", …" } else { "" };
                let pattern = self.0[idle].0.glob().glob().into();
                Err(Error::NoMatch { pattern, known: format!("{}{more}", known.join(", ")) })
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ferrotitan_nn::llama::build;

    use super::*;

    #[test]
    fn the_first_match_decides_and_none_is_idle() {
        let plan = Plan::new([("a.*", Style::Column), ("*.b", Style::Row)]).unwrap();
        assert_eq!(plan.style("a.b"), Some(Style::Column));
        assert_eq!(plan.style("c.b"), Some(Style::Row));
        assert_eq!(plan.style("c.d"), None);
        plan.check(["a.b", "c.b"]).unwrap();
        let idle = plan.check(["a.b"]).unwrap_err().to_string();
        assert!(idle.contains("\"*.b\"") && idle.contains("there are a.b"), "{idle}");
        assert!(matches!(plan.check(["a.b", "c.b", "c.d"]), Err(Error::Unplanned { name }) if name == "c.d"));
        assert!(matches!(Plan::new([("a[", Style::Row)]), Err(Error::Pattern { pattern, .. }) if pattern == "a["));
    }

    #[test]
    fn every_flavor_of_llama_is_planned() {
        for flavor in LlamaConfig::flavors() {
            let config = LlamaConfig { n_layers: 2, ..LlamaConfig::flavor(flavor, 256).unwrap() };
            let parameters = build(&config).unwrap().parameters();
            Plan::llama(&config).check(parameters.iter().map(|parameter| parameter.name())).unwrap();
        }
    }
}
