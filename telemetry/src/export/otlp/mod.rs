//! Metrics and spans over OTLP.

mod recorder;
mod settings;
mod spans;
mod watched;

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use opentelemetry::metrics::MeterProvider as _;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{ExporterBuildError, MetricExporter, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::metrics::SdkMeterProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Runtime;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::registry::LookupSpan;

use self::recorder::OtlpRecorder;
use self::settings::{Settings, resource};
use self::spans::WithRank;
use self::watched::Watched;
use super::runtime::runtime;
use crate::metrics::{Otlp, OtlpProtocol};
use crate::{Error, Result};

/// What the names of the workspace's crates begin with; a collector is told of it as service and scope.
const SCOPE: &str = "ferrotitan";

/// Sends metrics and spans from threads of its own. What is recorded is only put into memory, and spans beyond what fits
/// there are dropped, so a collector that is slow or away never holds up the run.
pub(crate) struct OtlpExporter {
    meters: SdkMeterProvider,
    spans: SdkTracerProvider,
    recorder: Arc<OtlpRecorder>,
    runtime: Option<Runtime>,
}

impl OtlpExporter {
    pub(crate) fn start(options: &Otlp, first_rank: usize) -> Result<Self> {
        let settings = Settings::read(options)?;
        // gRPC alone needs one.
        let runtime = (settings.protocol == OtlpProtocol::Grpc).then(runtime).transpose()?;
        let (metric_exporter, span_exporter) = {
            let _inside = runtime.as_ref().map(Runtime::enter);
            exporters(&settings).map_err(|error| Error::Otlp { reason: error.to_string() })?
        };
        let resource = resource(first_rank);
        let meters = SdkMeterProvider::builder()
            .with_periodic_exporter(Watched::new(metric_exporter, "metrics", settings.metrics))
            .with_resource(resource.clone())
            .build();
        let spans = SdkTracerProvider::builder()
            .with_span_processor(WithRank)
            .with_batch_exporter(Watched::new(span_exporter, "spans", settings.spans))
            .with_resource(resource)
            .build();
        let recorder = Arc::new(OtlpRecorder::new(meters.meter(SCOPE)));
        Ok(Self { meters, spans, recorder, runtime })
    }

    pub(crate) fn recorder(&self) -> Arc<OtlpRecorder> {
        Arc::clone(&self.recorder)
    }

    pub(crate) fn span_layer<S>(&self) -> Box<dyn Layer<S> + Send + Sync>
    where
        S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    {
        let layer = tracing_opentelemetry::layer()
            .with_tracer(self.spans.tracer(SCOPE))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false);
        spans::filter(layer)
    }

    pub(crate) fn finish(mut self, timeout: Duration) -> Result<()> {
        let (sender, receiver) = mpsc::channel();
        // A thread each, which is left behind if its time is up: not every wait inside has an end as short as ours.
        let (meters, spans, other) = (self.meters.clone(), self.spans.clone(), sender.clone());
        let metrics = std::thread::spawn(move || sender.send(meters.shutdown_with_timeout(timeout)));
        let traces = std::thread::spawn(move || other.send(spans.shutdown_with_timeout(timeout)));
        let until = Instant::now() + timeout;
        let mut result = Ok(());
        for _ in [metrics, traces] {
            let left = until.saturating_duration_since(Instant::now());
            let ended = match receiver.recv_timeout(left) {
                Ok(ended) => ended.map_err(|error| error.to_string()),
                Err(_) => Err(format!("the collector did not take them within {:.1} s", timeout.as_secs_f64())),
            };
            result = result.and(ended);
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        result.map_err(|reason| Error::Unsent { reason })
    }
}

fn exporters(settings: &Settings) -> std::result::Result<(MetricExporter, SpanExporter), ExporterBuildError> {
    let (metrics, spans) = (MetricExporter::builder(), SpanExporter::builder());
    Ok(match settings.protocol {
        OtlpProtocol::Grpc => (
            metrics.with_tonic().with_endpoint(&settings.metrics).build()?,
            spans.with_tonic().with_endpoint(&settings.spans).build()?,
        ),
        OtlpProtocol::Http => (
            metrics.with_http().with_endpoint(&settings.metrics).build()?,
            spans.with_http().with_endpoint(&settings.spans).build()?,
        ),
    })
}
