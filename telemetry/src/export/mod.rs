//! The exporters, each behind a feature of its name.

#[cfg(not(all(feature = "otlp", feature = "prometheus", feature = "tensorboard")))]
mod absent;
#[cfg(feature = "otlp")]
mod otlp;
#[cfg(feature = "prometheus")]
mod prometheus;
#[cfg(any(feature = "otlp", feature = "prometheus"))]
mod runtime;
#[cfg(feature = "tensorboard")]
mod tensorboard;

#[cfg(not(feature = "tensorboard"))]
pub(crate) use absent::EventFile;
#[cfg(not(feature = "otlp"))]
pub(crate) use absent::OtlpExporter;
#[cfg(not(feature = "prometheus"))]
pub(crate) use absent::PrometheusServer;
#[cfg(feature = "otlp")]
pub(crate) use otlp::OtlpExporter;
#[cfg(feature = "prometheus")]
pub(crate) use prometheus::PrometheusServer;
#[cfg(feature = "tensorboard")]
pub(crate) use tensorboard::EventFile;
