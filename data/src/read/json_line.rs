//! The text field of a line of JSONL.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use crate::error::{Error, Result};

/// The text in the field `field` of a JSON object; nothing where it is `null`.
///
/// # Errors
/// [`Error::Json`], [`Error::MissingField`] or [`Error::FieldType`].
pub(crate) fn text_of_line(bytes: &[u8], field: &str, path: &str, line: u64) -> Result<Option<String>> {
    let mut names = Vec::new();
    let mut parser = serde_json::Deserializer::from_slice(bytes);
    let value = Fields { field, names: &mut names }.deserialize(&mut parser);
    let value = value.and_then(|value| parser.end().map(|()| value));
    let value = value.map_err(|error| Error::Json { path: path.to_owned(), line, reason: reason(&error) })?;
    let place = || format!("{path}:{line}");
    match value {
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Null) => Ok(None),
        Some(other) => {
            let found = match other {
                Value::Bool(_) => "a boolean",
                Value::Number(_) => "a number",
                Value::Array(_) => "an array",
                _ => "an object",
            };
            Err(Error::FieldType { place: place(), field: field.to_owned(), found: found.to_owned() })
        }
        None => Err(Error::MissingField { place: place(), field: field.to_owned(), found: names }),
    }
}

/// The parser counts lines too, but within the one line that it was given: only its column says something.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let (what, _) = text.split_once(" at line ").unwrap_or((&text, ""));
    format!("{what} at column {}", error.column())
}

/// Keeps one field of an object, and of the others no more than the first names.
struct Fields<'a> {
    field: &'a str,
    names: &'a mut Vec<String>,
}

/// Names that a message lists.
const MAX_NAMES: usize = 20;

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = Option<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(Name(name)) = map.next_key()? {
            if name == self.field {
                found = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
                if self.names.len() < MAX_NAMES {
                    self.names.push(name.into_owned());
                }
            }
        }
        Ok(found)
    }
}

/// A name, borrowed from the line where it holds no escape.
#[derive(serde::Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Option<String>> {
        text_of_line(line.as_bytes(), "text", "f.jsonl", 7)
    }

    #[test]
    fn finds_the_field_and_says_what_is_there_instead() {
        assert_eq!(parse(r#"{"id": [1, {"text": 2}], "te\u0078t": "a\n\u00e9"}"#).unwrap().unwrap(), "a\né");
        assert_eq!(parse("{\"text\": \"x\"}\r\n").unwrap().unwrap(), "x");
        assert_eq!(parse(r#"{"text": null}"#).unwrap(), None);
        let said = |line: &str| parse(line).unwrap_err().to_string();
        assert_eq!(
            said(r#"{"content": "x", "id": 1}"#),
            r#"f.jsonl:7: no text field "text", but ["content", "id"]; set the text field to one of these"#
        );
        assert_eq!(said(r#"{"text": 3}"#), r#"f.jsonl:7: the field "text" is a number, not a string"#);
        for bad in ["", "[]", "3", "{", r#"{"text": "x"} y"#, r#"{"text": "\ud800"}"#, "\u{1}", r#"{"text": x}"#] {
            assert!(matches!(parse(bad), Err(Error::Json { line: 7, .. })), "{bad}");
        }
        assert!(matches!(text_of_line(b"{\"text\": \"\xff\"}", "text", "f", 1), Err(Error::Json { .. })));
        assert!(parse(&"[".repeat(100_000)).is_err());
        assert!(parse(&format!("{{\"text\": {}", "[".repeat(100_000))).is_err());
    }
}
