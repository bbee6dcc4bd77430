//! From a tree to the typed config: unknown keys and wrong types, all of them.

use super::Config;
use super::nearest::nearest_path;
use super::problem::{Origin, Problem};
use super::section::{Key, Section};
use super::tree::{self, Content, Table};
use serde_path_to_error::Segment;

/// Takes every key out that is not known, and says which one was meant.
pub(super) fn refuse_unknown(table: &mut Table, problems: &mut Vec<Problem>) {
    walk(table, Config::KEYS, "", problems);
}

fn walk(table: &mut Table, known: &'static [Key], prefix: &str, problems: &mut Vec<Problem>) {
    table.retain(|name, node| {
        let path = format!("{prefix}{name}");
        let Some(key) = known.iter().find(|key| key.name == name) else {
            problems.push(unknown(&path, known).at(node.origin.clone()));
            return false;
        };
        match &mut node.content {
            Content::Table(inner) if key.is_section() => walk(inner, key.keys, &format!("{path}."), problems),
            Content::Leaf(_) if key.is_section() => {
                problems.push(not_a_value(&path, key).at(node.origin.clone()));
                return false;
            }
            _ => {}
        }
        true
    });
}

/// The complaint about a key that is not known. `siblings` are the keys that it stands among.
pub(super) fn unknown(path: &str, siblings: &'static [Key]) -> Problem {
    let problem = Problem::new(&[path], format!("unknown key `{path}`"));
    match nearest_path(path, siblings) {
        Some(near) => problem.help(format!("the nearest known key is `{near}`")),
        None => problem,
    }
}

/// The complaint about a value where a section belongs.
pub(super) fn not_a_value(path: &str, key: &Key) -> Problem {
    let names: Vec<_> = key.keys.iter().map(|key| key.name).collect();
    Problem::new(&[path], format!("`{path}` is a section, and not a value"))
        .help(format!("its keys are {}", names.join(", ")))
}

/// Reads a tree whose keys are all known. Values of a wrong type are reported and taken out, so that their defaults stand.
pub(super) fn typed(table: &mut Table, problems: &mut Vec<Problem>) -> Config {
    // What a value of the command line was first refused for, while it is tried as a string.
    let mut first_refusals: Vec<(String, String)> = Vec::new();
    loop {
        let error = match serde_path_to_error::deserialize::<_, Config>(tree::to_value(table)) {
            Ok(config) => return config,
            Err(error) => error,
        };
        let path = leaf_path(table, error.path());
        let message = plain(error.inner().message());
        let Some(tree::Node { origin, content }) = tree::get_mut(table, &path) else {
            // Every refusal has a path into the tree. Were one to lack it, the loop must still end.
            problems.push(Problem::new(&[], message));
            return Config::default();
        };
        if let Content::Leaf(leaf) = content
            && let Some(text) = leaf.text.take()
        {
            first_refusals.push((path, message));
            leaf.value = toml::Value::String(text);
            continue;
        }
        let first = first_refusals.iter().find(|(refused, _)| *refused == path);
        let message = first.map_or(message, |(_, message)| message.clone());
        let origin = origin.clone();
        problems.push(refusal(&path, message, origin));
        tree::remove(table, &path);
    }
}

fn refusal(path: &str, message: String, origin: Origin) -> Problem {
    let problem = Problem::new(&[path], format!("`{path}`: {message}")).at(origin);
    match super::Config::default().value(path) {
        Some(default) => problem.help(format!("the default is {default}")),
        None => problem,
    }
}

/// The part of a path that leads to a node of the tree: a mistake in a list is the list's.
fn leaf_path(table: &Table, path: &serde_path_to_error::Path) -> String {
    let mut out = String::new();
    for segment in path {
        let Segment::Map { key } = segment else { break };
        let longer = if out.is_empty() { key.clone() } else { format!("{out}.{key}") };
        if tree::get(table, &longer).is_none() {
            break;
        }
        out = longer;
    }
    out
}

/// A refusal of serde's in the words of TOML.
fn plain(message: &str) -> String {
    const WORDS: &[(&str, &str)] = &[
        ("invalid type: ", ""),
        ("invalid value: ", ""),
        ("floating point `", "the number `"),
        ("integer `", "the integer `"),
        ("boolean `", "the boolean `"),
        ("string \"", "the string \""),
        ("map, ", "a table, "),
        ("sequence, ", "a list, "),
        ("unknown variant ", ""),
        (", expected one of ", " is none of "),
        (", expected ", " is not "),
        ("is not u64", "is not an integer of 0 or more"),
        ("is not usize", "is not an integer of 0 or more"),
        ("is not i64", "is not an integer"),
        ("is not f64", "is not a number"),
        ("is not a sequence", "is not a list"),
    ];
    let line = message.lines().next().unwrap_or_default();
    let text = WORDS.iter().fold(line.to_owned(), |text, (from, to)| text.replace(from, to));
    // A refusal repeats the value, however long that is. What would be right stands at the end.
    let (chars, part) = (text.chars().count(), 100);
    if chars <= 2 * part {
        return text;
    }
    text.chars().take(part).chain("…".chars()).chain(text.chars().skip(chars - part)).collect()
}
