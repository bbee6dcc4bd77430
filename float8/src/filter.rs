//! Which projections compute in eight bits.

use crate::small::costs_more_than_it_saves;
use crate::{Error, Recipe, Result};

/// The entry of a filter that leaves out what is too small to gain, by a measured table.
pub const AUTO_FILTER: &str = "auto_filter_small_kn";

/// What is known of a projection when it is decided upon.
#[derive(Debug)]
pub(crate) struct Candidate<'a> {
    /// Of the seam that it belongs to, such as `layers.0.attention.wqkv` or `output`.
    pub(crate) seam: &'a str,
    /// Of its weight, such as `layers.0.attention.wq.weight`. A tied head's is the embedding's.
    pub(crate) weight: &'a str,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
}

impl Candidate<'_> {
    /// As TorchTitan's filters are matched: the name of the module holds the text.
    fn is_named(&self, text: &str) -> bool {
        let module = self.weight.strip_suffix(".weight").unwrap_or(self.weight);
        module.contains(text) || self.seam.contains(text)
    }

    /// Why it is left out, if it is.
    pub(crate) fn reason(&self, recipe: Recipe, filters: &[String]) -> Option<String> {
        let (inputs, outputs, multiple) = (self.inputs, self.outputs, recipe.multiple());
        if let Some(filter) = filters.iter().find(|filter| *filter != AUTO_FILTER && self.is_named(filter)) {
            return Some(format!("the filter \"{filter}\""));
        }
        if !inputs.is_multiple_of(multiple) || !outputs.is_multiple_of(multiple) {
            return Some(format!("{inputs} inputs and {outputs} outputs are not both multiples of {multiple}"));
        }
        let automatic = filters.iter().any(|filter| filter == AUTO_FILTER);
        let small = automatic && costs_more_than_it_saves(recipe, inputs, outputs);
        small.then(|| format!("{inputs} inputs and {outputs} outputs are too small to gain"))
    }
}

/// Refuses a filter that matches nothing: a rename would put the head into eight bits without a word.
pub(crate) fn check(filters: &[String], candidates: &[Candidate<'_>]) -> Result<()> {
    let matches_nothing = |filter: &&String| !candidates.iter().any(|candidate| candidate.is_named(filter));
    let unmatched = filters.iter().filter(|filter| *filter != AUTO_FILTER).find(matches_nothing);
    match unmatched {
        Some(filter) => Err(Error::Filter {
            problem: format!("the filter \"{filter}\" matches nothing; correct or remove it"),
            names: candidates.iter().map(|candidate| candidate.weight.to_owned()).collect(),
        }),
        None => Ok(()),
    }
}
