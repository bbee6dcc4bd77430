//! Which layers make a stage.

use std::ops::Range;

use ferrotitan_schedule::Algorithm;

use crate::{Error, Result};

/// How a model is cut into stages. Names, meanings and results are TorchTitan's.
///
/// A stage is a range of neighbouring layers. A block (`layers.0`, …) counts as one layer; what comes before the first
/// block (the embedding) and after the last one (the norm and the head) counts as so many as the settings say. Stages
/// get equal counts, the first ones one more where that does not come out even. A model without blocks is cut into equal
/// numbers of layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// How many blocks the embedding counts as: the first stage has so many fewer.
    pub first_stage_less_layers: usize,
    /// How many blocks the norm and the head count as: the last stage has so many fewer.
    pub last_stage_less_layers: usize,
    /// The most that a stage may count, which decides the number of stages. When absent the schedule does.
    pub layers_per_stage: Option<usize>,
    /// The layers of each stage by name, instead of all the above.
    pub module_fqns_per_model_part: Option<Vec<Vec<String>>>,
}

impl Default for Split {
    fn default() -> Self {
        Self {
            first_stage_less_layers: 1,
            last_stage_less_layers: 1,
            layers_per_stage: None,
            module_fqns_per_model_part: None,
        }
    }
}

impl Split {
    /// How many stages each of `ranks` ranks holds: as many as the settings lead to, else as the schedule usually has.
    ///
    /// # Errors
    /// [`Error::Split`] when the stages cannot be dealt out evenly, or the schedule has no such number on a rank.
    pub fn stages_per_rank(&self, layers: &[&str], algorithm: Algorithm, ranks: usize) -> Result<usize> {
        let Some((stages, from)) = self.stages(layers)? else { return Ok(algorithm.default_stages_per_rank()) };
        let mut reasons = Vec::new();
        if ranks == 0 || stages == 0 || !stages.is_multiple_of(ranks) {
            let reason =
                format!("{from} gives {stages} stages, which {ranks} ranks cannot share evenly: give a multiple");
            reasons.push(reason);
        } else if let Err(error) = algorithm.generate(ranks, stages / ranks, 1) {
            reasons.push(format!("{from} gives {stages} stages: {error}"));
        }
        refuse(reasons)?;
        Ok(stages / ranks)
    }

    /// The layers of each of `stages` stages, as ranges of `layers`, the names of the model's layers in order.
    ///
    /// # Errors
    /// [`Error::Split`] with everything that is wrong: more stages than layers, a first or last stage too small for what
    /// it must hold, or names that are unknown, missing, there twice, or not in the model's order.
    pub fn parts(&self, layers: &[&str], stages: usize) -> Result<Vec<Range<usize>>> {
        if let Some((settled, from)) = self.stages(layers)?
            && settled != stages
        {
            return refuse(vec![format!("{from} gives {settled} stages, but the schedule has {stages}")])
                .map(|()| vec![]);
        }
        match &self.module_fqns_per_model_part {
            Some(parts) => by_name(layers, parts),
            None => self.by_count(layers, stages),
        }
    }

    /// The number of stages that the settings lead to, and which of them.
    fn stages(&self, layers: &[&str]) -> Result<Option<(usize, String)>> {
        if let Some(parts) = &self.module_fqns_per_model_part {
            return Ok(Some((parts.len(), "module_fqns_per_model_part".into())));
        }
        match self.layers_per_stage {
            Some(0) => refuse(vec!["layers_per_stage is 0: give at least 1".into()]).map(|()| None),
            Some(most) => {
                Ok(Some((Counted::new(self, layers).total.div_ceil(most), format!("layers_per_stage = {most}"))))
            }
            None => Ok(None),
        }
    }

    fn by_count(&self, layers: &[&str], stages: usize) -> Result<Vec<Range<usize>>> {
        if stages <= 1 {
            refuse((stages == 0).then(|| "there are 0 stages: give at least 1".into()).into_iter().collect())?;
            return Ok(vec![0..layers.len(); 1]);
        }
        let Counted { first, blocks, last, total } = Counted::new(self, layers);
        let count = |stage: usize| total / stages + usize::from(stage < total % stages);
        let mut reasons = Vec::new();
        if stages > total {
            let counted = if first + last > 0 { " (with what the first and last stage have less)" } else { "" };
            reasons.push(format!("{stages} stages of {total} layers{counted}: use at most {total} stages"));
        } else {
            let ends = [("first", 0, first), ("last", stages - 1, last)];
            for (which, stage, less) in ends.into_iter().filter(|&(_, stage, less)| less > count(stage)) {
                let has = count(stage);
                reasons.push(format!(
                    "the {which} stage has room for {has} layers of {total}, fewer than {which}_stage_less_layers = \
                     {less}: use fewer stages, or less"
                ));
            }
        }
        refuse(reasons)?;
        let mut parts = Vec::with_capacity(stages);
        let mut start = 0;
        for stage in 0..stages {
            let end = match stage {
                0 => blocks.start + count(0) - first,
                _ if stage + 1 == stages => layers.len(),
                _ => start + count(stage),
            };
            parts.push(start..end);
            start = end;
        }
        Ok(parts)
    }
}

/// What a model's layers count as.
struct Counted {
    /// What stands before the blocks.
    first: usize,
    blocks: Range<usize>,
    /// What stands after them.
    last: usize,
    total: usize,
}

impl Counted {
    fn new(split: &Split, layers: &[&str]) -> Self {
        let is_block = |name: &&str| name.starts_with("layers.");
        let (Some(start), Some(end)) = (layers.iter().position(is_block), layers.iter().rposition(is_block)) else {
            return Self { first: 0, blocks: 0..layers.len(), last: 0, total: layers.len() };
        };
        let blocks = start..end + 1;
        let first = if start > 0 { split.first_stage_less_layers } else { 0 };
        let last = if blocks.end < layers.len() { split.last_stage_less_layers } else { 0 };
        let total = first.saturating_add(blocks.len()).saturating_add(last);
        Self { first, blocks, last, total }
    }
}

fn by_name(layers: &[&str], parts: &[Vec<String>]) -> Result<Vec<Range<usize>>> {
    const KEY: &str = "module_fqns_per_model_part";
    let mut reasons = Vec::new();
    let mut stage_of: Vec<Option<usize>> = vec![None; layers.len()];
    for (stage, names) in parts.iter().enumerate() {
        if names.is_empty() {
            reasons.push(format!("stage {stage} of {KEY} has no layer"));
        }
        for name in names {
            match layers.iter().position(|layer| layer == name) {
                None => reasons.push(format!("{KEY} names {name:?}, but the model's layers are {}", layers.join(", "))),
                Some(at) => {
                    if let Some(before) = stage_of[at].replace(stage) {
                        reasons.push(format!("{KEY} names {name:?} in stages {before} and {stage}"));
                    }
                }
            }
        }
    }
    for (layer, _) in layers.iter().zip(&stage_of).filter(|(_, stage)| stage.is_none()) {
        reasons.push(format!("{KEY} leaves out {layer:?}"));
    }
    let order = layers.iter().zip(&stage_of).collect::<Vec<_>>();
    for pair in order.windows(2).filter(|pair| pair[0].1 > pair[1].1 && pair[1].1.is_some()) {
        let (before, after) = (pair[0].0, pair[1].0);
        reasons.push(format!("{KEY} puts {before:?} into a later stage than {after:?}: keep the model's order"));
    }
    refuse(reasons)?;
    let mut start = 0;
    let range = |names: &Vec<String>| {
        start += names.len();
        start - names.len()..start
    };
    Ok(parts.iter().map(range).collect())
}

fn refuse(reasons: Vec<String>) -> Result<()> {
    if reasons.is_empty() { Ok(()) } else { Err(Error::Split { reasons }) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn llama(blocks: usize) -> Vec<String> {
        let blocks = (0..blocks).map(|index| format!("layers.{index}"));
        std::iter::once("tok_embeddings".into()).chain(blocks).chain(["norm".into(), "output".into()]).collect()
    }

    fn parts(split: &Split, blocks: usize, stages: usize) -> Result<Vec<usize>> {
        let layers = llama(blocks);
        let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
        split.parts(&layers, stages).map(|parts| parts.into_iter().map(|part| part.len()).collect())
    }

    #[test]
    fn parts_are_torch_titan_s() {
        // 16 blocks count as 18 with both ends.
        let split = Split::default();
        assert_eq!(parts(&split, 16, 2).unwrap(), [9, 10]);
        assert_eq!(parts(&split, 16, 4).unwrap(), [5, 5, 4, 5]);
        // Llama 3 405B: 126 blocks on 128 stages, the first of the embedding alone and the last of the head.
        let llama_3 = parts(&split, 126, 128).unwrap();
        assert_eq!((llama_3[0], llama_3[1], llama_3[126], llama_3[127]), (1, 1, 1, 2));
        let split = Split { first_stage_less_layers: 0, last_stage_less_layers: 3, ..split };
        assert_eq!(parts(&split, 9, 3).unwrap(), [5, 4, 3]);
    }

    #[test]
    fn the_settings_decide_the_number_of_stages() {
        let layers = llama(6);
        let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
        let split = Split { layers_per_stage: Some(1), ..Split::default() };
        assert_eq!(split.stages_per_rank(&layers, Algorithm::Interleaved1F1B, 4).unwrap(), 2);
        assert_eq!(Split::default().stages_per_rank(&layers, Algorithm::DualPipeV, 4).unwrap(), 2);
        assert_eq!(Split::default().stages_per_rank(&layers, Algorithm::Zb1p, 4).unwrap(), 1);
        let message = split.stages_per_rank(&layers, Algorithm::Interleaved1F1B, 3).unwrap_err().to_string();
        assert!(message.contains("layers_per_stage = 1 gives 8 stages, which 3 ranks"), "{message}");
        let message = split.stages_per_rank(&layers, Algorithm::ZbvZeroBubble, 2).unwrap_err().to_string();
        assert!(message.contains("places 2 stages on each rank, not 4"), "{message}");
        let message = split.parts(&layers, 4).unwrap_err().to_string();
        assert!(message.contains("gives 8 stages, but the schedule has 4"), "{message}");
    }

    #[test]
    fn names_decide_where_they_are_given() {
        let named = |parts: &[&[&str]]| {
            let part = |names: &&[&str]| names.iter().map(ToString::to_string).collect();
            Split { module_fqns_per_model_part: Some(parts.iter().map(part).collect()), ..Split::default() }
        };
        let split = named(&[&["layers.0", "tok_embeddings"], &["layers.1"], &["norm", "output"]]);
        assert_eq!(parts(&split, 2, 3).unwrap(), [2, 1, 2]);
        let wrong = named(&[&["tok_embeddings", "layers.1"], &["layers.0", "layers.0", "layer.2"], &[]]);
        let Err(Error::Split { reasons }) = parts(&wrong, 2, 3) else { panic!("accepted") };
        let expected = [
            "names \"layers.0\" in stages 1 and 1",
            "names \"layer.2\", but",
            "stage 2 of module_fqns_per_model_part has no layer",
            "leaves out \"norm\"",
            "leaves out \"output\"",
            "puts \"layers.0\" into a later stage than \"layers.1\"",
        ];
        assert_eq!(reasons.len(), expected.len(), "{reasons:?}");
        for (reason, expected) in reasons.iter().zip(expected) {
            assert!(reason.contains(expected), "{reason}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let split = Split { first_stage_less_layers: 4, last_stage_less_layers: 5, ..Split::default() };
        let Err(Error::Split { reasons }) = parts(&split, 2, 4) else { panic!("accepted") };
        assert_eq!(reasons.len(), 2, "{reasons:?}");
        assert!(
            reasons[0].contains("first_stage_less_layers = 4") && reasons[1].contains("last_stage_less_layers = 5")
        );
        assert!(parts(&Split::default(), 2, 5).unwrap_err().to_string().contains("at most 4 stages"));
        assert!(parts(&Split::default(), 2, 0).is_err());
        assert!(parts(&Split { layers_per_stage: Some(0), ..Split::default() }, 2, 2).is_err());
    }

    proptest! {
        /// Every layer is in one stage, in order, no stage is empty, and counts differ by one at most.
        #[test]
        fn stages_are_even(blocks in 0_usize..40, stages in 1_usize..12, first in 0_usize..4, last in 0_usize..4) {
            let split = Split { first_stage_less_layers: first, last_stage_less_layers: last, ..Split::default() };
            let layers = llama(blocks);
            let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
            let Ok(parts) = split.parts(&layers, stages) else {
                let total = if blocks == 0 { 3 } else { blocks + first + last };
                prop_assert!(stages > total || first > total / stages || last > total / stages);
                return Ok(());
            };
            prop_assert_eq!(parts.len(), stages);
            prop_assert_eq!((parts[0].start, parts[stages - 1].end), (0, layers.len()));
            prop_assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert!(parts.iter().all(|part| !part.is_empty()));
            if blocks > 0 && stages > 1 {
                let mut counts: Vec<usize> = parts.iter().map(Range::len).collect();
                counts[0] = counts[0] - 1 + first;
                counts[stages - 1] = counts[stages - 1] - 2 + last;
                prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{counts:?}");
            }
        }
    }
}
