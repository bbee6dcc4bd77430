//! Keeps spans of the crate `tracing`, by rank.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::{Clock, RankTrace, Span, Track};
use crate::Place;

/// The target of the spans that are kept: `step`, `forward`, `backward`, `optimizer`, `data`, `checkpoint`, `validation`,
/// and with the fields `stage` and `microbatch` the spans `stage_forward`, `stage_backward`, `stage_input_gradient` and
/// `stage_weight_gradient`. Any other name is kept too, and counts as part of what it lies in.
pub const TARGET: &str = "ferrotitan::span";

/// How many spans of a rank are kept: some hundred bytes each.
const CAPACITY: usize = 1 << 20;

thread_local! {
    /// The rank of this thread.
    static RANK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The spans of the ranks of this process. Off until it is told to keep them; clones are the same.
#[derive(Clone, Debug)]
pub struct Spans(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    on: AtomicBool,
    clock: Clock,
    kept: Mutex<BTreeMap<usize, Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    spans: Vec<Span>,
    dropped: u64,
}

impl Spans {
    /// None yet. Times are those of `clock`.
    pub fn new(clock: Clock) -> Self {
        Spans(Arc::new(Shared { on: AtomicBool::new(false), clock, kept: Mutex::default() }))
    }

    /// Says which rank the spans of this thread are of. Spans of other threads are not kept.
    pub fn enter_rank(rank: usize) {
        RANK.set(Some(rank));
    }

    /// Begins to keep spans, or stops. One that has begun before counts only if they were kept then.
    pub fn keep(&self, on: bool) {
        self.0.on.store(on, Ordering::Relaxed);
    }

    /// The clock of the spans.
    pub fn clock(&self) -> Clock {
        self.0.clock
    }

    /// The layer that keeps them, for a [`tracing_subscriber::Registry`]. It asks for no span but its own.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let wanted = filter_fn(|metadata| metadata.is_span() && metadata.target() == TARGET);
        SpanLayer(self.clone()).with_filter(wanted)
    }

    /// Gives a rank's spans away.
    pub fn take(&self, place: Place) -> RankTrace {
        let Kept { spans, dropped } = self.kept().remove(&place.rank).unwrap_or_default();
        RankTrace { place, spans, dropped }
    }

    fn kept(&self) -> MutexGuard<'_, BTreeMap<usize, Kept>> {
        // Consistent between statements.
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, rank: usize, span: Span) {
        let mut all = self.kept();
        let kept = all.entry(rank).or_default();
        match kept.spans.len() < CAPACITY {
            true => kept.spans.push(span),
            false => kept.dropped += 1,
        }
    }
}

/// The layer of [`Spans::layer`].
struct SpanLayer(Spans);

/// A span that has not ended.
struct Open {
    rank: usize,
    begin: i64,
    fields: Fields,
}

#[derive(Default)]
struct Fields(Vec<(Cow<'static, str>, Value)>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value.into());
    }
}

impl Fields {
    fn set(&mut self, field: &Field, value: Value) {
        match self.0.iter_mut().find(|(name, _)| name == field.name()) {
            Some((_, known)) => *known = value,
            None => self.0.push((field.name().into(), value)),
        }
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.0.iter().find(|(known, _)| known == name)?.1.as_u64()
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let shared = &self.0.0;
        let (true, Some(rank)) = (shared.on.load(Ordering::Relaxed), RANK.get()) else { return };
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(Open { rank, begin: shared.clock.now(), fields });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(&mut open.fields);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let end = self.0.0.clock.now();
        let Some(span) = context.span(&id) else { return };
        let Some(Open { rank, begin, fields }) = span.extensions_mut().remove::<Open>() else { return };
        let name = span.metadata().name();
        let letter = match name {
            "stage_forward" => Some('F'),
            "stage_backward" => Some('B'),
            "stage_input_gradient" => Some('I'),
            "stage_weight_gradient" => Some('W'),
            _ => None,
        };
        let (name, track) = match (letter, fields.number("stage"), fields.number("microbatch")) {
            (Some(letter), Some(stage), Some(microbatch)) => {
                (Cow::Owned(format!("{stage}{letter}{microbatch}")), Track::Pipeline)
            }
            _ => (Cow::Borrowed(name), Track::Compute),
        };
        self.0.push(rank, Span { name, track, begin, end, fields: fields.0 });
    }
}
