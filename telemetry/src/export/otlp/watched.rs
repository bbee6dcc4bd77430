//! An exporter whose failures are told.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::metrics::Temporality;
use opentelemetry_sdk::metrics::data::ResourceMetrics;
use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};

/// Warns when the collector stops taking what it is sent, once each time that it stops.
#[derive(Debug)]
pub(super) struct Watched<E> {
    exporter: E,
    what: &'static str,
    address: String,
    fails: AtomicBool,
}

impl<E> Watched<E> {
    pub(super) fn new(exporter: E, what: &'static str, address: String) -> Self {
        Self { exporter, what, address, fails: AtomicBool::new(false) }
    }

    fn told(&self, result: OTelSdkResult) -> OTelSdkResult {
        let failed_before = self.fails.swap(result.is_err(), Ordering::Relaxed);
        if let (Err(error), false) = (&result, failed_before) {
            tracing::warn!("cannot send {} to {}: {error}; the run goes on without", self.what, self.address);
        }
        result
    }
}

impl<E: PushMetricExporter> PushMetricExporter for Watched<E> {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        self.told(self.exporter.export(metrics).await)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn temporality(&self) -> Temporality {
        self.exporter.temporality()
    }
}

impl<E: SpanExporter> SpanExporter for Watched<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.told(self.exporter.export(batch).await)
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use opentelemetry_sdk::error::OTelSdkError;
    use std::io::Read as _;
    use std::sync::Mutex;

    #[test]
    fn a_failure_is_warned_of_once_each_time_that_it_begins() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let subscriber = tracing_subscriber::fmt().with_writer(Mutex::new(log.reopen().unwrap())).finish();
        let watched = Watched::new((), "metrics", "http://there:1".to_owned());
        tracing::subscriber::with_default(subscriber, || {
            let failed = || Err(OTelSdkError::InternalFailure("nobody answers".to_owned()));
            for result in [failed(), failed(), Ok(()), failed()] {
                let _ = watched.told(result);
            }
        });
        let mut text = String::new();
        log.reopen().unwrap().read_to_string(&mut text).unwrap();
        let warnings: Vec<_> = text.lines().filter(|line| line.contains("WARN")).collect();
        assert_eq!(warnings.len(), 2, "{text}");
        assert!(
            warnings[0].contains("cannot send metrics to http://there:1") && warnings[0].contains("nobody answers")
        );
    }
}
