//! A config before it has types: tables and values, each with the place where it was written.

use super::problem::{Origin, Problem};
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// A table or a value.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) origin: Origin,
    pub(crate) content: Content,
}

#[derive(Clone, Debug)]
pub(crate) enum Content {
    Table(Table),
    Leaf(Leaf),
}

/// Nodes by their key.
pub(crate) type Table = BTreeMap<String, Node>;

/// A value: what it reads as, and what else it may be.
#[derive(Clone, Debug)]
pub(crate) struct Leaf {
    pub(crate) value: toml::Value,
    /// The words of the command line, which are a string where `value`'s type does not fit.
    pub(crate) text: Option<String>,
}

/// Reads TOML, with all the places where it is not TOML.
pub(crate) fn parse(text: &str) -> (Table, Vec<Problem>) {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut problems: Vec<Problem> = errors
        .iter()
        .map(|error| {
            let problem = Problem::new(&[], format!("this is not TOML: {}", error.message()));
            problem.at(error.span().map_or(Origin::Default, Origin::File))
        })
        .collect();
    // What was recovered around a mistake is a guess, and nothing to complain of.
    let table = if problems.is_empty() { read_table(document.into_inner(), text, &mut problems) } else { Table::new() };
    (table, problems)
}

fn read_table(table: DeTable<'_>, text: &str, problems: &mut Vec<Problem>) -> Table {
    let mut nodes = Table::new();
    for (key, value) in table {
        let (start, end) = (key.span().start, key.span().end);
        let value_end = value.span().end;
        // The label covers `key = value`, where that is one line.
        let one_line = value_end >= end && text.get(start..value_end).is_some_and(|text| !text.contains('\n'));
        let is_table = matches!(value.get_ref(), DeValue::Table(_));
        let origin = Origin::File(start..if one_line && !is_table { value_end } else { end });
        let content = match value.into_inner() {
            DeValue::Table(table) => Content::Table(read_table(table, text, problems)),
            value => match toml::Value::deserialize(ValueDeserializer::from(Spanned::new(start..end, value))) {
                Ok(value) => Content::Leaf(Leaf { value, text: None }),
                Err(error) => {
                    problems.push(Problem::new(&[key.get_ref()], error.message().to_owned()).at(origin));
                    continue;
                }
            },
        };
        nodes.insert(key.into_inner().into_owned(), Node { origin, content });
    }
    nodes
}

/// The node at a path.
pub(crate) fn get<'a>(table: &'a Table, path: &str) -> Option<&'a Node> {
    match path.split_once('.') {
        None => table.get(path),
        Some((name, rest)) => match &table.get(name)?.content {
            Content::Table(table) => get(table, rest),
            Content::Leaf(_) => None,
        },
    }
}

/// The node at a path, to be changed.
pub(crate) fn get_mut<'a>(table: &'a mut Table, path: &str) -> Option<&'a mut Node> {
    match path.split_once('.') {
        None => table.get_mut(path),
        Some((name, rest)) => match &mut table.get_mut(name)?.content {
            Content::Table(table) => get_mut(table, rest),
            Content::Leaf(_) => None,
        },
    }
}

/// Takes the node at a path out.
pub(crate) fn remove(table: &mut Table, path: &str) -> Option<Node> {
    match path.split_once('.') {
        None => table.remove(path),
        Some((name, rest)) => match &mut table.get_mut(name)?.content {
            Content::Table(table) => remove(table, rest),
            Content::Leaf(_) => None,
        },
    }
}

/// Puts a node at a path, with the tables that lead there. A value in the way stays, and the node is dropped: the value
/// is a mistake that is reported for itself.
pub(crate) fn insert(table: &mut Table, path: &str, node: Node) {
    match path.split_once('.') {
        None => {
            table.insert(path.to_owned(), node);
        }
        Some((name, rest)) => {
            let empty = || Node { origin: node.origin.clone(), content: Content::Table(Table::new()) };
            if let Content::Table(table) = &mut table.entry(name.to_owned()).or_insert_with(empty).content {
                insert(table, rest, node);
            }
        }
    }
}

/// The tree as one TOML value, without its places.
pub(crate) fn to_value(table: &Table) -> toml::Value {
    let entries = table.iter().map(|(name, node)| {
        let value = match &node.content {
            Content::Table(table) => to_value(table),
            Content::Leaf(leaf) => leaf.value.clone(),
        };
        (name.clone(), value)
    });
    toml::Value::Table(entries.collect())
}

/// The place of every value, by its path.
pub(crate) fn origins(table: &Table) -> BTreeMap<String, Origin> {
    fn walk(table: &Table, prefix: &str, out: &mut BTreeMap<String, Origin>) {
        for (name, node) in table {
            let path = format!("{prefix}{name}");
            match &node.content {
                Content::Table(table) => walk(table, &format!("{path}."), out),
                Content::Leaf(_) => {
                    out.insert(path, node.origin.clone());
                }
            }
        }
    }
    let mut out = BTreeMap::new();
    walk(table, "", &mut out);
    out
}
