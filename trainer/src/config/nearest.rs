//! What somebody who misspelt a word most likely meant.

use super::section::{self, Key};

/// The nearest of some words, however far; `None` where there are none.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // The first of equals: sections and keys stand in the order of their importance.
    known.into_iter().min_by(|a, b| likeness(word, b).total_cmp(&likeness(word, a)))
}

/// 0 for words that have nothing in common, 1 for the same word.
fn likeness(a: &str, b: &str) -> f64 {
    // Words of which one begins with the other are near, however long the rest is: `lr` and `lr_min`.
    strsim::normalized_damerau_levenshtein(a, b).max(0.9 * strsim::jaro_winkler(a, b))
}

/// The nearest known path to one that is not known. `siblings` are the keys that it stands among.
pub(super) fn nearest_path(path: &str, siblings: &'static [Key]) -> Option<String> {
    let (parent, name) = path.rsplit_once('.').map_or(("", path), |(parent, name)| (parent, name));
    let beside = nearest(name, siblings.iter().map(|key| key.name));
    let likeness_beside = beside.map_or(0.0, |found| likeness(name, found));

    // The right key in the wrong section is the likelier mistake, unless a key beside it is almost the same.
    let paths = section::paths();
    let elsewhere = paths.iter().filter_map(|path| Some((path, likeness(name, path.rsplit_once('.')?.1))));
    let elsewhere = elsewhere.min_by(|a, b| b.1.total_cmp(&a.1));
    match (beside, elsewhere) {
        (_, Some((path, likeness))) if likeness >= 0.9 && likeness > likeness_beside => Some(path.clone()),
        (Some(name), _) if parent.is_empty() => Some(name.to_owned()),
        (Some(name), _) => Some(format!("{parent}.{name}")),
        (None, Some((path, _))) => Some(path.clone()),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_key() {
        let training = section::find("training").map_or(&[][..], |key| key.keys);
        assert_eq!(nearest_path("training.seqlen", training).as_deref(), Some("training.seq_len"));
        assert_eq!(nearest_path("training.batchsize", training).as_deref(), Some("training.local_batch_size"));
    }

    #[test]
    fn a_key_of_another_section() {
        let training = section::find("training").map_or(&[][..], |key| key.keys);
        assert_eq!(nearest_path("training.warmup_steps", training).as_deref(), Some("lr_scheduler.warmup_steps"));
        let top = <crate::config::Config as section::Section>::KEYS;
        assert_eq!(nearest_path("traning", top).as_deref(), Some("training"));
        assert_eq!(nearest_path("seq_len", top).as_deref(), Some("training.seq_len"));
    }
}
