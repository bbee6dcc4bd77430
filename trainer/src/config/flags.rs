//! `--section.key value` on the command line, over the file.

use super::problem::{Origin, Problem};
use super::read::{not_a_value, unknown};
use super::section::{self, Key, Section};
use super::tree::{self, Content, Leaf, Node, Table};
use super::{Config, renamed};

/// One override as it was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flag {
    /// The dotted path, by today's name.
    pub path: String,
    /// The value, if there was one.
    pub value: Option<String>,
    /// All of it, for messages.
    pub text: String,
}

/// Divides a command line into the config's overrides and the rest.
///
/// An override begins with `--` and has a dot in its name. Names are TorchTitan's, with `-` for `_` if one likes;
/// a boolean needs no value, and `--section.no_key` or `--no-section.key` is false.
pub fn split(words: impl IntoIterator<Item = String>) -> (Vec<String>, Vec<Flag>) {
    let (mut rest, mut flags) = (Vec::new(), Vec::new());
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        let Some((name, inline)) = override_name(&word) else {
            rest.push(word);
            continue;
        };
        let (path, negated) = meaning(&name);
        let follows = |next: &String| !next.starts_with("--") && (!is_boolean(&path) || is_truth(next));
        let value = match inline {
            _ if negated => Some("false".to_owned()),
            Some(value) => Some(value),
            None => words.next_if(follows),
        };
        let text = match &value {
            Some(value) if !negated && !word.contains('=') => format!("{word} {value}"),
            _ => word,
        };
        flags.push(Flag { path, value, text });
    }
    (rest, flags)
}

/// The name of an override, and its value where that stands behind `=`.
fn override_name(word: &str) -> Option<(String, Option<String>)> {
    let body = word.strip_prefix("--")?;
    let (name, value) = match body.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (body, None),
    };
    name.contains('.').then(|| (name.replace('-', "_"), value))
}

/// The path that a name means, and whether it says no.
fn meaning(name: &str) -> (String, bool) {
    let is_key = |path: &str| section::find(path).is_some();
    let path = renamed::current(name);
    if is_key(&path) {
        return (path, false);
    }
    let (parent, last) = name.rsplit_once('.').unwrap_or(("", name));
    let inner = last.strip_prefix("no_").map(|key| format!("{parent}.{key}"));
    let outer = name.strip_prefix("no_").map(str::to_owned);
    for positive in [inner, outer].into_iter().flatten() {
        let positive = renamed::current(&positive);
        if is_key(&positive) {
            return (positive, true);
        }
    }
    (path, false)
}

fn is_boolean(path: &str) -> bool {
    Config::default().value(path).is_some_and(|value| value.is_boolean())
}

fn is_truth(word: &str) -> bool {
    matches!(word.to_ascii_lowercase().as_str(), "true" | "false")
}

/// Lays the overrides over the tree, the last of a key on top.
pub(super) fn apply(table: &mut Table, flags: &[Flag], problems: &mut Vec<Problem>) {
    for flag in flags {
        match leaf(flag) {
            Ok(leaf) => {
                let node = Node { origin: Origin::Flag(flag.text.clone()), content: Content::Leaf(leaf) };
                tree::insert(table, &flag.path, node);
            }
            Err(problem) => problems.push(problem.at(Origin::Flag(flag.text.clone()))),
        }
    }
}

fn leaf(flag: &Flag) -> Result<Leaf, Problem> {
    let path = flag.path.as_str();
    match section::find(path) {
        None => return Err(unknown(path, siblings(path))),
        Some(key) if key.is_section() => return Err(not_a_value(path, key)),
        Some(_) => {}
    }
    let Some(text) = &flag.value else {
        let default = Config::default().value(path);
        if default.is_some_and(|value| !value.is_boolean()) {
            return Err(Problem::new(&[path], format!("`--{path}` needs a value")));
        }
        return Ok(Leaf { value: toml::Value::Boolean(true), text: None });
    };
    let value = match parsed(text) {
        Some(value) => value,
        None => toml::Value::String(text.clone()),
    };
    Ok(Leaf { value, text: Some(text.clone()) })
}

/// The words as a TOML value, if they are one: `10`, `1e-4`, `true`, `["a", "b"]`.
fn parsed(text: &str) -> Option<toml::Value> {
    if is_truth(text) {
        return Some(toml::Value::Boolean(text.eq_ignore_ascii_case("true")));
    }
    // A date would never be meant.
    let value = text.parse().ok().filter(|value: &toml::Value| !value.is_datetime());
    // `.5` and `1.` are numbers to everybody but TOML.
    let is_number = text.contains(|c: char| c.is_ascii_digit());
    value.or_else(|| Some(toml::Value::Float(text.parse().ok().filter(|_| is_number)?)))
}

/// The keys that a path stands among.
fn siblings(path: &str) -> &'static [Key] {
    let parent = path.rsplit_once('.').map(|(parent, _)| parent);
    parent.and_then(section::find).map_or(Config::KEYS, |key| key.keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_words(line: &str) -> (Vec<String>, Vec<(String, Option<String>)>) {
        let (rest, flags) = split(line.split_whitespace().map(str::to_owned));
        (rest, flags.into_iter().map(|flag| (flag.path, flag.value)).collect())
    }

    fn one(line: &str) -> (String, Option<String>) {
        let (rest, mut flags) = split_words(line);
        assert!(rest.is_empty(), "{rest:?}");
        assert_eq!(flags.len(), 1);
        flags.remove(0)
    }

    #[test]
    fn values_beside_and_behind_an_equals_sign() {
        assert_eq!(one("--training.steps 10"), ("training.steps".into(), Some("10".into())));
        assert_eq!(one("--training.steps=10"), ("training.steps".into(), Some("10".into())));
        assert_eq!(one("--training.seq-len=10"), ("training.seq_len".into(), Some("10".into())));
        assert_eq!(one("--checkpoint.load_step -1"), ("checkpoint.load_step".into(), Some("-1".into())));
        assert_eq!(
            one("--quantize.linear.float8.recipe_name rowwise"),
            ("quantize.linear.float8.recipe_name".into(), Some("rowwise".into()))
        );
    }

    #[test]
    fn booleans() {
        assert_eq!(one("--checkpoint.enable"), ("checkpoint.enable".into(), None));
        assert_eq!(one("--checkpoint.enable true"), ("checkpoint.enable".into(), Some("true".into())));
        for no in ["--checkpoint.no_enable", "--checkpoint.no-enable", "--no-checkpoint.enable"] {
            assert_eq!(one(no), ("checkpoint.enable".into(), Some("false".into())), "{no}");
        }
        // A boolean does not swallow the file behind it.
        let (rest, flags) = split_words("--checkpoint.enable run.toml");
        assert_eq!(rest, ["run.toml"]);
        assert_eq!(flags.len(), 1);
    }

    #[test]
    fn the_rest_stays() {
        let line = "train run.toml --nproc 2 --training.steps 3 --master-addr 10.0.0.1 --config=a.toml";
        let (rest, flags) = split_words(line);
        assert_eq!(rest, ["train", "run.toml", "--nproc", "2", "--master-addr", "10.0.0.1", "--config=a.toml"]);
        assert_eq!(flags.len(), 1);
    }

    #[test]
    fn older_names() {
        assert_eq!(one("--float8.emulate").0, "quantize.linear.float8.emulate");
        assert_eq!(one("--training.no_deterministic"), ("debug.deterministic".into(), Some("false".into())));
    }
}
