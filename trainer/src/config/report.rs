//! Mistakes as text for people: each with its file, its line and the line itself, or with the words of the command line.

use super::load::Loaded;
use super::problem::{Origin, Problem};
use miette::{Diagnostic, LabeledSpan, MietteHandler, MietteHandlerOpts, NamedSource, SourceCode};
use std::fmt;
use std::ops::Range;

/// Bytes of a line that is shown.
const LONGEST_LINE: usize = 2000;

/// Writes mistakes down.
#[derive(Debug)]
pub struct Reporter {
    color: bool,
    width: usize,
}

impl Reporter {
    /// One that colors its text or does not, for lines of so many columns.
    pub fn new(color: bool, width: usize) -> Self {
        Self { color, width: width.clamp(40, 160) }
    }

    /// All of these mistakes in the config, and how many there are.
    pub fn render(&self, loaded: &Loaded, problems: &[Problem]) -> String {
        self.render_text(&loaded.name, &loaded.text, problems)
    }

    /// The same for any TOML text, with the name that it goes by.
    pub fn render_text(&self, name: &str, text: &str, problems: &[Problem]) -> String {
        let handler = MietteHandlerOpts::new()
            .color(self.color)
            .unicode(self.color)
            .terminal_links(false)
            .force_graphical(true)
            .width(self.width)
            .context_lines(1)
            .build();
        let source = NamedSource::new(name, text.to_owned());
        let mut out = String::new();
        for problem in problems {
            let located = Located { problem, source: &source };
            out.push_str(Rendered(&handler, &located).to_string().trim_start_matches('\n'));
            out.push('\n');
        }
        let count = problems.len();
        out.push_str(&format!("{count} {} in {name}\n", if count == 1 { "mistake" } else { "mistakes" }));
        out
    }
}

/// A mistake beside the text that it was made in.
#[derive(Debug)]
struct Located<'a> {
    problem: &'a Problem,
    source: &'a NamedSource<String>,
}

impl Located<'_> {
    /// The place in words, where its line is too long to be shown: miette cannot point beyond column 65535.
    fn in_words(&self, span: &Range<usize>) -> Option<String> {
        let text = self.source.inner();
        let before = text.get(..span.start)?;
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        let end = text[span.start..].find('\n').map_or(text.len(), |at| span.start + at);
        let line = before.matches('\n').count() + 1;
        let column = text[start..span.start].chars().count() + 1;
        (end - start > LONGEST_LINE).then(|| format!("see {}:{line}:{column}", self.source.name()))
    }

    /// Whether a place can be pointed at.
    fn is_shown(&self, origin: &Origin) -> bool {
        matches!(origin, Origin::File(span) if self.in_words(span).is_none())
    }

    /// Places that are not in the file, in words.
    fn elsewhere(&self) -> impl Iterator<Item = String> {
        self.problem.places.iter().filter_map(|(key, origin)| match origin {
            Origin::File(span) => self.in_words(span),
            Origin::Flag(text) => Some(format!("`{text}` is on the command line")),
            Origin::Default if key.is_empty() => None,
            Origin::Default => {
                let default = super::Config::default().value(key);
                let default = default.map_or_else(|| "not set".to_owned(), |value| value.to_string());
                super::section::find(key).map(|_| format!("`{key}` is {default} by default"))
            }
        })
    }
}

impl fmt::Display for Located<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem.message)
    }
}

impl std::error::Error for Located<'_> {}

impl Diagnostic for Located<'_> {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let lines: Vec<String> = self.elsewhere().chain(self.problem.help.clone()).collect();
        (!lines.is_empty()).then(|| Box::new(lines.join("\n")) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        let shown = self.problem.places.iter().any(|(_, origin)| self.is_shown(origin));
        shown.then_some(self.source as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let spans = self.problem.places.iter().filter_map(|(_, origin)| match origin {
            Origin::File(span) if self.is_shown(origin) => Some((span.start, span.len())),
            _ => None,
        });
        // The first is the one to change, and gives the line that is named.
        let labels = spans.enumerate().map(|(index, span)| match index {
            0 => LabeledSpan::new_primary_with_span(None, span),
            _ => LabeledSpan::new_with_span(None, span),
        });
        Some(Box::new(labels))
    }
}

/// A diagnostic through miette's handler, as text.
struct Rendered<'a>(&'a MietteHandler, &'a Located<'a>);

impl fmt::Display for Rendered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use miette::ReportHandler;
        self.0.debug(self.1, f)
    }
}
