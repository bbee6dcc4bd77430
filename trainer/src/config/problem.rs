//! A mistake in a config, and where it was made.

use std::ops::Range;

/// Where a value was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// In the file, at these bytes.
    File(Range<usize>),
    /// On the command line, in these words.
    Flag(String),
    /// Nowhere: it is the default.
    #[default]
    Default,
}

/// A mistake: what is wrong, with which keys, and what would be right.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// The dotted paths of the keys that it is about, the first of them the one to change; none where the file as a whole
    /// is at fault.
    pub keys: Vec<String>,
    /// What is wrong.
    pub message: String,
    /// What would be right.
    pub help: Option<String>,
    /// Where the keys were written, once that is known.
    pub places: Vec<(String, Origin)>,
}

impl Problem {
    /// A mistake with these keys.
    pub fn new(keys: &[&str], message: impl Into<String>) -> Self {
        let keys = keys.iter().map(|key| (*key).to_owned()).collect();
        Self { keys, message: message.into(), help: None, places: Vec::new() }
    }

    /// The same, saying what would be right.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// The same, made at one known place.
    #[must_use]
    pub fn at(mut self, origin: Origin) -> Self {
        let key = self.keys.first().cloned().unwrap_or_default();
        self.places = vec![(key, origin)];
        self
    }
}

/// Something to know about a config that is no mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The dotted path of the key that it is about.
    pub key: String,
    /// What to know.
    pub message: String,
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.key, self.message)
    }
}
