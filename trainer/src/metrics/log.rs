//! Log lines: above the progress bar, with the rank where several write to one console.

use super::bar::line_above_bar;
use super::color::Color;
use std::cell::Cell;
use std::fmt;
use std::io::{self, Write};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer, Registry};

thread_local! {
    static RANK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Says which rank this thread is, for its log lines. A process that is one rank, and whose launcher prefixes its lines,
/// does not say so.
pub fn enter_rank(rank: usize) {
    RANK.set(Some(rank));
}

/// Sends log lines to standard error. The environment variable `RUST_LOG` chooses what is logged; from "info" on if it is
/// not set. A second call changes nothing.
///
/// `layers` listen too, whatever `RUST_LOG` says.
pub fn init_log(color: bool, layers: Vec<Box<dyn Layer<Registry> + Send + Sync>>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt::layer().event_format(Line { color }).with_writer(|| AboveBar);
    let subscriber = tracing_subscriber::registry().with(layers).with(lines.with_filter(filter));
    // Somebody else's subscriber, in a program that uses us as a library, stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// `[rank 1] warning: the message name=value`
struct Line {
    color: bool,
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if let Some(rank) = RANK.get() {
            write!(writer, "[rank {rank}] ")?;
        }
        let level = *event.metadata().level();
        let (word, color) = match level {
            Level::ERROR => ("error: ", Color::Red),
            Level::WARN => ("warning: ", Color::Yellow),
            Level::INFO => ("", Color::Green),
            Level::DEBUG => ("debug: ", Color::Blue),
            Level::TRACE => ("trace: ", Color::Magenta),
        };
        if !word.is_empty() {
            write!(writer, "{}", color.paint(self.color, word))?;
        }
        let mut fields = Fields { writer: &mut writer, result: Ok(()), first: true };
        event.record(&mut fields);
        fields.result?;
        writeln!(writer)
    }
}

/// The message, then the other fields.
struct Fields<'a, 'w> {
    writer: &'a mut Writer<'w>,
    result: fmt::Result,
    first: bool,
}

impl Visit for Fields<'_, '_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let space = if std::mem::take(&mut self.first) { "" } else { " " };
        let result = match field.name() {
            "message" => write!(self.writer, "{space}{value:?}"),
            name => write!(self.writer, "{space}{name}={value:?}"),
        };
        self.result = self.result.and(result);
    }
}

/// Standard error, with the progress bar out of the way.
struct AboveBar;

impl Write for AboveBar {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A whole event comes in one call.
        let line = String::from_utf8_lossy(bytes);
        line_above_bar(line.trim_end(), || io::stderr().lock().write_all(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
