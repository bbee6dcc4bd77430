//! Settings, and the words of the matrix that may stand among them.

use super::cell::Tolerance;
use crate::config::{Flag, Loaded, Origin, Problem, split};
use toml::{Table, Value};

/// Some settings of the config, and what else a reference, a value of an axis or a cell says.
#[derive(Clone, Debug, Default)]
pub(super) struct Variant {
    pub(super) settings: Vec<Flag>,
    pub(super) name: Option<String>,
    pub(super) reference: Option<String>,
    pub(super) tolerance: Option<Tolerance>,
    pub(super) then: Vec<Vec<Flag>>,
}

/// Which words may stand among the settings.
pub(super) const OF_REFERENCE: &[&str] = &["tolerance"];
pub(super) const OF_VALUE: &[&str] = &["reference"];
pub(super) const OF_CELL: &[&str] = &["name", "reference", "tolerance", "then"];

/// Reads settings, and notes every mistake of theirs at their place.
pub(super) struct Reader<'a> {
    pub(super) what: &'a str,
    pub(super) origin: &'a Origin,
    pub(super) problems: &'a mut Vec<Problem>,
}

impl Reader<'_> {
    pub(super) fn wrong(&mut self, message: impl std::fmt::Display) {
        let message = format!("{}: {message}", self.what);
        self.problems.push(Problem::new(&[], message).at(self.origin.clone()));
    }

    /// Settings with those words among them that `words` lists.
    pub(super) fn variant(&mut self, table: &Table, words: &[&str]) -> Variant {
        let mut variant = Variant::default();
        let mut rest = Table::new();
        for (key, value) in table {
            if !words.contains(&key.as_str()) {
                rest.insert(key.clone(), value.clone());
                continue;
            }
            match key.as_str() {
                "name" => variant.name = self.text(key, value),
                "reference" => variant.reference = self.text(key, value),
                "tolerance" => variant.tolerance = self.tolerance(value),
                _ => variant.then = self.then(value),
            }
        }
        variant.settings = self.settings(&rest);
        variant
    }

    fn text(&mut self, key: &str, value: &Value) -> Option<String> {
        let text = value.as_str().map(str::to_owned);
        if text.is_none() {
            self.wrong(format_args!("`{key}` must be a name in quotes"));
        }
        text
    }

    fn tolerance(&mut self, value: &Value) -> Option<Tolerance> {
        let number = |value: &Value| {
            let number = value.as_float().or_else(|| value.as_integer().map(|n| n as f64));
            number.filter(|number| number.is_finite() && *number >= 0.0)
        };
        let found = match value {
            Value::Table(table) if table.len() == 2 => table
                .get("loss")
                .and_then(number)
                .and_then(|loss| Some(Tolerance { loss, grad_norm: table.get("grad_norm").and_then(number)? })),
            value => number(value).map(|both| Tolerance { loss: both, grad_norm: both }),
        };
        if found.is_none() {
            self.wrong("`tolerance` must be a number of 0 or more, or { loss = …, grad_norm = … }");
        }
        found
    }

    fn then(&mut self, value: &Value) -> Vec<Vec<Flag>> {
        let tables: Option<Vec<&Table>> = value.as_array().and_then(|list| list.iter().map(Value::as_table).collect());
        match tables {
            Some(tables) if !tables.is_empty() => tables.into_iter().map(|table| self.settings(table)).collect(),
            _ => {
                self.wrong("`then` must be a list of settings: [{ … }, …]");
                Vec::new()
            }
        }
    }

    /// Settings as the flags that they would be on the command line.
    fn settings(&mut self, table: &Table) -> Vec<Flag> {
        let mut words = Vec::new();
        flatten(table, "", &mut words);
        let mut flags = Vec::new();
        for (path, value) in words {
            let value = match value {
                Value::String(text) => text.clone(),
                value => value.to_string(),
            };
            let (unknown, flag) = split([format!("--{path}={value}")]);
            if unknown.is_empty() {
                flags.extend(flag);
            } else {
                self.wrong(format_args!("`{path}` is no key of the config, and no word of the matrix here"));
            }
        }
        for problem in Loaded::from_text("", "", &flags).problems {
            let help = problem.help.as_ref().map(|help| format!("; {help}")).unwrap_or_default();
            self.wrong(format_args!("{}{help}", problem.message));
        }
        flags
    }
}

/// The values of a table by their dotted paths.
fn flatten<'a>(table: &'a Table, prefix: &str, out: &mut Vec<(String, &'a Value)>) {
    for (key, value) in table {
        match value {
            Value::Table(inner) => flatten(inner, &format!("{prefix}{key}."), out),
            value => out.push((format!("{prefix}{key}"), value)),
        }
    }
}
