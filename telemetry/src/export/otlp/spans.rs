//! Which spans are sent, and what is added to them.

use std::time::Duration;

use opentelemetry::trace::Span as _;
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use tracing::subscriber::Interest;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::registry::LookupSpan;

use super::SCOPE;
use crate::metrics::thread::{Runs, runs};

/// Lets through the spans of this workspace, unless they are of a rank that is not exported. Not those of the libraries
/// that send: each export would give the next one something to say.
pub(super) fn filter<S>(layer: impl Layer<S> + Send + Sync) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    let ours = |metadata: &Metadata<'_>| metadata.is_span() && metadata.target().starts_with(SCOPE);
    let wanted = dynamic_filter_fn(move |metadata, _| ours(metadata) && runs() != Runs::Silent);
    // What is not ours is sorted out once a place in the code, not at each span.
    let wanted = wanted.with_callsite_filter(move |metadata| match ours(metadata) {
        true => Interest::sometimes(),
        false => Interest::never(),
    });
    layer.with_filter(wanted).boxed()
}

/// Says in each span which rank it is of.
#[derive(Debug)]
pub(super) struct WithRank;

impl SpanProcessor for WithRank {
    fn on_start(&self, span: &mut Span, _: &Context) {
        if let Runs::Exported(rank) = runs() {
            span.set_attribute(KeyValue::new("rank", i64::try_from(rank).unwrap_or(i64::MAX)));
        }
    }

    fn on_end(&self, _: SpanData) {}

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}
