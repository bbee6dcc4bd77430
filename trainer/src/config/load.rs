//! From a file and the command line to a config, with every mistake on the way.

use super::problem::{Note, Origin, Problem};
use super::{Config, Flag, flags, ignored, read, renamed, tree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A file that cannot be read at all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The system refuses it.
    #[error("cannot read the config {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// It holds something else than text.
    #[error("the config {path} is not UTF-8 text: see byte {valid_up_to}")]
    NotText {
        /// The file.
        path: String,
        /// Bytes that are text.
        valid_up_to: usize,
    },
}

/// A config as written, what is wrong with it, and where each of its values stands.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The config; a value that could not be read has its default.
    pub config: Config,
    /// Mistakes of reading: unknown keys, wrong types, broken TOML.
    pub problems: Vec<Problem>,
    /// The name that the file goes by.
    pub name: String,
    /// What it says.
    pub text: String,
    origins: BTreeMap<String, Origin>,
}

impl Loaded {
    /// Reads a file, and the overrides of the command line over it.
    ///
    /// # Errors
    /// When the file cannot be read as text. All other mistakes are in [`problems`](Self::problems).
    pub fn load(path: &Path, overrides: &[Flag]) -> Result<Self, LoadError> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| LoadError::Read { path: name.clone(), source })?;
        let text = String::from_utf8(bytes).map_err(|error| LoadError::NotText {
            path: name.clone(),
            valid_up_to: error.utf8_error().valid_up_to(),
        })?;
        Ok(Self::from_text(&name, &text, overrides))
    }

    /// The same for a text that is already here, with the name it goes by in messages.
    pub fn from_text(name: &str, text: &str, overrides: &[Flag]) -> Self {
        let (mut table, mut problems) = tree::parse(text);
        renamed::apply(&mut table, &mut problems);
        read::refuse_unknown(&mut table, &mut problems);
        flags::apply(&mut table, overrides, &mut problems);
        let config = read::typed(&mut table, &mut problems);
        let origins = tree::origins(&table);
        let mut loaded = Self { config, problems: Vec::new(), name: name.to_owned(), text: text.to_owned(), origins };
        loaded.problems = loaded.place(problems);
        loaded
    }

    /// All mistakes: those of reading, and those others that do not follow from them.
    pub fn with(&self, found: Vec<Problem>) -> Vec<Problem> {
        let bad: BTreeSet<&String> = self.problems.iter().flat_map(|problem| &problem.keys).collect();
        let broken = self.problems.iter().any(|problem| problem.keys.is_empty());
        let follows = |problem: &Problem| broken || problem.keys.iter().any(|key| bad.contains(key));
        let found = found.into_iter().filter(|problem| !follows(problem)).collect();
        let mut all = self.problems.clone();
        all.extend(self.place(found));
        // In the order of the file; what is not in it comes last.
        all.sort_by_key(|problem| match problem.places.first() {
            Some((_, Origin::File(span))) => span.start,
            _ => usize::MAX,
        });
        all
    }

    /// What to know of keys that have no meaning here.
    pub fn notes(&self) -> Vec<Note> {
        ignored(&self.config)
    }

    /// Where the value of a key was written.
    pub fn origin(&self, path: &str) -> Origin {
        self.origins.get(path).cloned().unwrap_or_default()
    }

    fn place(&self, mut problems: Vec<Problem>) -> Vec<Problem> {
        for problem in &mut problems {
            if problem.places.is_empty() {
                problem.places = problem.keys.iter().map(|key| (key.clone(), self.origin(key))).collect();
            }
        }
        problems
    }
}
