//! The language of a matrix, read with every mistake at once.

use super::variant::{OF_CELL, OF_REFERENCE, OF_VALUE, Reader, Variant};
use crate::config::tree::{self, Content, Node};
use crate::config::{Flag, LoadError, Loaded, Origin, Problem, nearest, split};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use toml::{Table, Value};

/// A matrix as it was written.
#[derive(Debug)]
pub(crate) struct Matrix {
    /// The config under all runs: the name that it goes by, and its text.
    pub(super) base: (String, String),
    /// Settings over it, under all others.
    pub(super) common: Vec<Flag>,
    pub(crate) timeout: Duration,
    pub(super) reference: Option<String>,
    pub(super) skip_illegal: Vec<String>,
    pub(super) exclude: Vec<BTreeMap<String, String>>,
    pub(super) references: Vec<(String, Variant)>,
    pub(super) axes: Vec<Axis>,
    pub(super) cells: Vec<Variant>,
}

/// An axis, and its values by name.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) name: String,
    pub(super) values: Vec<(String, Variant)>,
}

/// What a run may take unless the matrix says otherwise.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The words of a matrix.
const WORDS: &[&str] =
    &["base", "steps", "timeout", "reference", "skip_illegal", "exclude", "references", "axes", "cells"];

/// Reads a matrix; settings of the command line go over its base. Paths in it are from the current folder.
pub(crate) fn read(text: &str, overrides: &[Flag]) -> Result<Matrix, Vec<Problem>> {
    let (mut tree, mut problems) = tree::parse(text);
    if !problems.is_empty() {
        return Err(problems);
    }
    for (name, node) in &tree {
        if !WORDS.contains(&name.as_str()) {
            let near = nearest(name, WORDS.iter().copied()).unwrap_or_default();
            let problem = Problem::new(&[], format!("`{name}` is no word of a matrix"));
            problems.push(
                problem
                    .help(format!("the nearest is `{near}`; there are {}", WORDS.join(", ")))
                    .at(node.origin.clone()),
            );
        }
    }
    let mut words = Words { problems: &mut problems };
    let base = words.base(tree.remove("base"));
    let mut common = words.steps(tree.remove("steps"));
    common.extend_from_slice(overrides);
    let matrix = Matrix {
        base,
        common,
        timeout: words.timeout(tree.remove("timeout")),
        reference: words.reference(tree.remove("reference")),
        skip_illegal: words.skip_illegal(tree.remove("skip_illegal")),
        references: words.references(tree.remove("references")),
        axes: words.axes(tree.remove("axes")),
        exclude: words.exclude(tree.get("exclude")),
        cells: words.cells(tree.get("cells")),
    };
    let place = |word: &str| tree.get(word).map_or(Origin::Default, |node| node.origin.clone());
    matrix.check(&place("exclude"), &place("cells"), &mut problems);
    if problems.is_empty() { Ok(matrix) } else { Err(problems) }
}

struct Words<'a> {
    problems: &'a mut Vec<Problem>,
}

impl Words<'_> {
    fn wrong(&mut self, origin: &Origin, message: impl Into<String>) {
        self.problems.push(Problem::new(&[], message).at(origin.clone()));
    }

    fn base(&mut self, node: Option<Node>) -> (String, String) {
        let mut base = ("[base]".to_owned(), String::new());
        match node {
            None => {
                let message = "the matrix has no `base`: a config file, or a table [base] with the sections of one";
                self.problems.push(Problem::new(&[], message));
            }
            Some(Node { content: Content::Table(table), .. }) => {
                base.1 = toml::to_string(&tree::to_value(&table)).unwrap_or_default()
            }
            Some(Node { content: Content::Leaf(leaf), origin }) => match leaf.value.as_str() {
                None => self.wrong(&origin, "`base` must be a config file, or a table"),
                Some(path) => match Loaded::load(Path::new(path), &[]) {
                    Ok(loaded) => base = (path.to_owned(), loaded.text),
                    Err(error @ (LoadError::Read { .. } | LoadError::NotText { .. })) => {
                        self.wrong(&origin, error.to_string());
                    }
                },
            },
        }
        base
    }

    /// A positive whole number.
    fn count(&mut self, word: &str, node: Option<Node>) -> Option<u64> {
        let node = node?;
        let value = match &node.content {
            Content::Leaf(leaf) => leaf.value.as_integer().and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0),
            Content::Table(_) => None,
        };
        if value.is_none() {
            self.wrong(&node.origin, format!("`{word}` must be a whole number of 1 or more"));
        }
        value
    }

    fn steps(&mut self, node: Option<Node>) -> Vec<Flag> {
        let steps = self.count("steps", node);
        steps.map(|steps| split([format!("--training.steps={steps}")]).1).unwrap_or_default()
    }

    fn timeout(&mut self, node: Option<Node>) -> Duration {
        self.count("timeout", node).map_or(TIMEOUT, Duration::from_secs)
    }

    fn reference(&mut self, node: Option<Node>) -> Option<String> {
        let node = node?;
        match &node.content {
            Content::Leaf(leaf) if leaf.value.is_str() => leaf.value.as_str().map(str::to_owned),
            _ => {
                self.wrong(&node.origin, "`reference` must be the name of one of the [references]");
                None
            }
        }
    }

    fn skip_illegal(&mut self, node: Option<Node>) -> Vec<String> {
        let Some(node) = node else { return Vec::new() };
        let list = match &node.content {
            Content::Leaf(leaf) => leaf.value.as_array(),
            Content::Table(_) => None,
        };
        let words: Option<Vec<String>> =
            list.and_then(|list| list.iter().map(|word| word.as_str().map(str::to_owned)).collect());
        match words {
            Some(words) if !words.iter().any(String::is_empty) => words,
            _ => {
                self.wrong(&node.origin, "`skip_illegal` must be a list of words of the messages: [\"heads\"]");
                Vec::new()
            }
        }
    }

    /// The entries of a table of tables, in the order of the file.
    fn entries(&mut self, word: &str, node: Option<Node>) -> Vec<(String, Node)> {
        match node {
            None => Vec::new(),
            Some(Node { content: Content::Table(table), .. }) => {
                let mut entries: Vec<(String, Node)> = table.into_iter().collect();
                entries.sort_by_key(|(_, node)| match &node.origin {
                    Origin::File(span) => span.start,
                    _ => 0,
                });
                entries
            }
            Some(node) => {
                self.wrong(&node.origin, format!("`{word}` must be a table: [{word}.NAME]"));
                Vec::new()
            }
        }
    }

    fn name(&mut self, what: &str, name: &str, origin: &Origin) {
        if let Some(why) = bad_name(name) {
            self.wrong(origin, format!("{what} cannot be called \"{name}\": {why}"));
        }
    }

    fn references(&mut self, node: Option<Node>) -> Vec<(String, Variant)> {
        let mut references = Vec::new();
        for (name, node) in self.entries("references", node) {
            self.name("a reference", &name, &node.origin);
            let what = format!("reference {name}");
            let mut reader = Reader { what: &what, origin: &node.origin, problems: self.problems };
            let Content::Table(table) = &node.content else {
                reader.wrong("must be a table of settings");
                continue;
            };
            let variant = reader.variant(&as_table(table), OF_REFERENCE);
            if !table.contains_key("tolerance") {
                reader.wrong("`tolerance` is missing: how far a cell may be from it");
            }
            references.push((name, variant));
        }
        references
    }

    fn axes(&mut self, node: Option<Node>) -> Vec<Axis> {
        let mut axes = Vec::new();
        for (name, node) in self.entries("axes", node) {
            let mut values = Vec::new();
            match node.content {
                // A key in quotes, and its values.
                Content::Leaf(leaf) => {
                    let what = format!("axis {name}");
                    let mut reader = Reader { what: &what, origin: &node.origin, problems: self.problems };
                    match leaf.value.as_array().filter(|list| !list.is_empty()) {
                        None => reader.wrong("must be a list of values of a key, or a table of settings by name"),
                        Some(list) => {
                            for value in list {
                                let table = Table::from_iter([(name.clone(), value.clone())]);
                                values.push((value_name(value), reader.variant(&table, &[])));
                            }
                        }
                    }
                }
                Content::Table(_) => {
                    let node = Node { origin: node.origin.clone(), content: node.content };
                    for (value, inner) in self.entries("axes", Some(node)) {
                        let what = format!("axis {name}, value {value}");
                        let mut reader = Reader { what: &what, origin: &inner.origin, problems: self.problems };
                        match &inner.content {
                            Content::Table(table) => values.push((value, reader.variant(&as_table(table), OF_VALUE))),
                            Content::Leaf(_) => reader.wrong(
                                "must be a table of settings; an axis of one key is that key in quotes, and a list",
                            ),
                        }
                    }
                }
            }
            // The last part of a key says enough.
            let short = name.rsplit('.').next().unwrap_or(&name).to_owned();
            self.name("an axis", &short, &node.origin);
            for (value, _) in &values {
                self.name("a value of an axis", value, &node.origin);
            }
            if axes.iter().any(|axis: &Axis| axis.name == short) {
                self.wrong(&node.origin, format!("there are two axes called {short}"));
            }
            axes.push(Axis { name: short, values });
        }
        axes
    }

    fn exclude(&mut self, node: Option<&Node>) -> Vec<BTreeMap<String, String>> {
        let tables = self.tables("exclude", "[{ AXIS = \"VALUE\", … }]", node);
        let entry = |(axis, value): (&String, &Value)| (axis.clone(), value_name(value));
        tables.iter().map(|table| table.iter().map(entry).collect()).collect()
    }

    fn cells(&mut self, node: Option<&Node>) -> Vec<Variant> {
        let tables = self.tables("cells", "[[cells]]", node);
        let Some(node) = node else { return Vec::new() };
        let mut cells = Vec::new();
        for (index, table) in tables.iter().enumerate() {
            let name = table.get("name").and_then(Value::as_str);
            let what = name.map_or_else(|| format!("cell {}", index + 1), |name| format!("cell {name}"));
            let mut reader = Reader { what: &what, origin: &node.origin, problems: self.problems };
            let variant = reader.variant(table, OF_CELL);
            if !table.contains_key("name") {
                reader.wrong("`name` is missing");
            }
            if let Some(name) = &variant.name {
                self.name("a cell", name, &node.origin);
            }
            cells.push(variant);
        }
        cells
    }

    fn tables(&mut self, word: &str, form: &str, node: Option<&Node>) -> Vec<Table> {
        let Some(node) = node else { return Vec::new() };
        let list = match &node.content {
            Content::Leaf(leaf) => leaf.value.as_array(),
            Content::Table(_) => None,
        };
        let tables: Option<Vec<Table>> =
            list.and_then(|list| list.iter().map(|value| value.as_table().cloned()).collect());
        if tables.is_none() {
            self.wrong(&node.origin, format!("`{word}` must be a list of tables: {form}"));
        }
        tables.unwrap_or_default()
    }
}

impl Matrix {
    /// The text of the config under all runs.
    pub(crate) fn base_text(&self) -> &str {
        &self.base.1
    }

    /// What does not fit together.
    fn check(&self, exclude: &Origin, cells: &Origin, problems: &mut Vec<Problem>) {
        let mut wrong = |origin: &Origin, message: String| problems.push(Problem::new(&[], message).at(origin.clone()));
        let known = |name: &String| self.references.iter().any(|(reference, _)| reference == name);
        let named = self.axes.iter().flat_map(|axis| &axis.values).map(|(_, variant)| variant);
        for name in named.chain(&self.cells).filter_map(|variant| variant.reference.as_ref()).chain(&self.reference) {
            if !known(name) {
                wrong(&Origin::Default, format!("there is no reference \"{name}\": add [references.{name}]"));
            }
        }
        if self.reference.is_none() && self.references.len() > 1 {
            wrong(
                &Origin::Default,
                "there are several references: say which is the default, `reference = \"…\"`".into(),
            );
        }
        if self.axes.is_empty() && self.cells.is_empty() {
            wrong(&Origin::Default, "the matrix has neither [axes] nor [[cells]]".into());
        }
        for (index, axis) in self.axes.iter().enumerate() {
            for other in &self.axes[index + 1..] {
                for key in axis.keys().filter(|key| other.keys().any(|theirs| theirs == *key)) {
                    let (a, b) = (&axis.name, &other.name);
                    wrong(&Origin::Default, format!("the axes {a} and {b} both set `{key}`, and one would be lost"));
                }
            }
        }
        for combination in &self.exclude {
            for (axis, value) in combination {
                match self.axes.iter().find(|known| known.name == *axis) {
                    None => wrong(exclude, format!("`exclude`: there is no axis {axis}")),
                    Some(known) if !known.values.iter().any(|(name, _)| name == value) => {
                        wrong(exclude, format!("`exclude`: the axis {axis} has no value {value}"));
                    }
                    Some(_) => {}
                }
            }
        }
        for (index, cell) in self.cells.iter().enumerate() {
            if cell.name.is_some() && self.cells[..index].iter().any(|other| other.name == cell.name) {
                wrong(cells, format!("there are two cells called {}", cell.name.as_deref().unwrap_or_default()));
            }
        }
    }
}

impl Axis {
    /// Keys that its values set, each once; `reference` is one of them.
    fn keys(&self) -> impl Iterator<Item = &str> {
        let settings = self.values.iter().flat_map(|(_, variant)| &variant.settings).map(|flag| flag.path.as_str());
        let reference = self.values.iter().any(|(_, variant)| variant.reference.is_some()).then_some("reference");
        let mut keys: Vec<&str> = settings.chain(reference).collect();
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter()
    }
}

fn as_table(table: &tree::Table) -> Table {
    match tree::to_value(table) {
        Value::Table(table) => table,
        _ => Table::new(),
    }
}

/// What a value is called.
fn value_name(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Why this cannot name a folder, if it cannot.
fn bad_name(name: &str) -> Option<&'static str> {
    let is_plain = |c: char| c.is_alphanumeric() || "._-+=".contains(c);
    match name {
        "" => Some("it is empty"),
        _ if name.starts_with('.') => Some("it begins with a dot"),
        _ if name.len() > 100 => Some("it is longer than 100 bytes"),
        _ if !name.chars().all(is_plain) => Some("letters, digits and . _ - + = can be in a name"),
        _ => None,
    }
}
