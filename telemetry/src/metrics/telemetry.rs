//! The exporters of a process.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use metrics::Recorder as _;
use metrics_util::layers::{Fanout, FanoutBuilder};
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::registry::LookupSpan;

use super::rank::RankMetrics;
use super::recorder::RankRecorder;
use super::table::{self, Kind};
use crate::export::{EventFile, OtlpExporter, PrometheusServer};
use crate::tui::View;
use crate::{Error, Result};

/// Where Prometheus scrapes a run unless told otherwise: this machine alone can.
pub const PROMETHEUS_ADDRESS: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9464));

/// How long the end of a run may wait for the exporters, unless [`Telemetry::finish`] says.
const FLUSH: Duration = Duration::from_secs(5);

/// Which exporters there are. None by default.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Export every rank, not rank 0 alone.
    pub all_ranks: bool,
    /// Serve metrics to Prometheus at this address. Whoever can reach it can read them. If all ranks are exported and are
    /// processes of their own, rank 1 has the next port, and so on.
    pub prometheus: Option<SocketAddr>,
    /// Send metrics and spans over OTLP.
    pub otlp: Option<Otlp>,
    /// Write TensorBoard's event files into this folder; into `rank_0`, `rank_1`, … below it if all ranks are exported.
    pub tensorboard: Option<PathBuf>,
    /// Show steps in a live view.
    pub view: Option<View>,
}

/// Where OTLP goes. What is not set comes from the environment: `OTEL_EXPORTER_OTLP_ENDPOINT`,
/// `OTEL_EXPORTER_OTLP_PROTOCOL` and the others of their kind (headers, timeout, interval, resource); without those,
/// HTTP to this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Otlp {
    /// The collector's base address, `http://host:4317` for gRPC or `http://host:4318` for HTTP.
    pub endpoint: Option<String>,
    /// How to talk to it.
    pub protocol: Option<OtlpProtocol>,
}

/// How OTLP travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpProtocol {
    /// `grpc`
    Grpc,
    /// `http/protobuf`
    Http,
}

/// The exporters of a process, from [`Telemetry::start`] to [`Telemetry::finish`]. All ranks of the process share them.
pub struct Telemetry {
    options: Options,
    exporters: &'static Fanout,
    /// Held for as long as it shall serve.
    _prometheus: Option<PrometheusServer>,
    otlp: Option<OtlpExporter>,
}

impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Telemetry").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Telemetry {
    /// Starts the exporters of a process that runs these ranks. If none of them is to be exported, there are none.
    ///
    /// The first of a process is also where threads that no rank runs record.
    ///
    /// # Errors
    /// When an exporter is not in this build, or its address is taken or wrong. That nobody answers an OTLP endpoint is
    /// no error: it is warned of once, and the run goes on.
    pub fn start(mut options: Options, ranks: Range<usize>) -> Result<Self> {
        if !(options.all_ranks || ranks.contains(&0)) {
            options = Options::default();
        }
        let mut exporters = FanoutBuilder::default();
        let address = options.prometheus.map(|base| nth_port(base, ranks.start)).transpose()?;
        let prometheus = address.map(PrometheusServer::start).transpose()?;
        if let Some(server) = &prometheus {
            exporters = exporters.add_recorder(server.recorder());
        }
        let otlp = options.otlp.as_ref().map(|otlp| OtlpExporter::start(otlp, ranks.start)).transpose()?;
        if let Some(exporter) = &otlp {
            exporters = exporters.add_recorder(exporter.recorder());
        }
        // For as long as the process lives, as the facade's global recorder does anyway.
        let exporters: &'static Fanout = Box::leak(Box::new(exporters.build()));
        describe(exporters);
        // Whoever was first stays.
        let _ = metrics::set_global_recorder(exporters);
        Ok(Self { options, exporters, _prometheus: prometheus, otlp })
    }

    /// Where this rank records. To be called once a rank: TensorBoard's file is begun here.
    ///
    /// # Errors
    /// When TensorBoard's file cannot be begun, or is not in this build.
    pub fn rank(&self, rank: usize) -> Result<RankMetrics> {
        if rank != 0 && !self.options.all_ranks {
            return Ok(RankMetrics::silent());
        }
        let recorder = RankRecorder::new(self.exporters, rank);
        let events = self.options.tensorboard.as_ref().map(|folder| match self.options.all_ranks {
            true => EventFile::create(&folder.join(format!("rank_{rank}"))),
            false => EventFile::create(folder),
        });
        // What the view shows of a step is the same on every rank.
        let view = self.options.view.clone().filter(|_| rank == 0);
        Ok(RankMetrics::new(recorder, events.transpose()?, view))
    }

    /// Spans for OTLP, as a layer of the program's `tracing` subscriber; none unless OTLP is on. Only spans of this
    /// workspace's crates are sent.
    pub fn span_layer<S>(&self) -> Option<Box<dyn Layer<S> + Send + Sync>>
    where
        S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    {
        self.otlp.as_ref().map(OtlpExporter::span_layer)
    }

    /// Sends what has not been sent yet, but waits no longer than this, and ends the exporters.
    ///
    /// # Errors
    /// When not everything could be sent.
    pub fn finish(mut self, timeout: Duration) -> Result<()> {
        self.otlp.take().map_or(Ok(()), |otlp| otlp.finish(timeout))
    }
}

impl Drop for Telemetry {
    /// As [`Telemetry::finish`]: a run that fails is the one whose last numbers matter.
    fn drop(&mut self) {
        if let Some(otlp) = self.otlp.take() {
            // It has warned of what it could not send.
            let _ = otlp.finish(FLUSH);
        }
    }
}

/// The address of the process whose first rank this is.
fn nth_port(base: SocketAddr, rank: usize) -> Result<SocketAddr> {
    let port = usize::from(base.port()).checked_add(rank).and_then(|port| u16::try_from(port).ok());
    let reason = || format!("for rank {rank} its port would be {} + {rank}", base.port());
    let port = port.ok_or_else(|| Error::Prometheus { address: base, reason: reason() })?;
    Ok(SocketAddr::new(base.ip(), port))
}

/// Tells the exporters what each metric is.
fn describe(exporters: &Fanout) {
    for metric in table::ALL {
        let (name, unit) = (metric.name.into(), metric.unit.of_facade());
        match metric.kind {
            Kind::Gauge => exporters.describe_gauge(name, unit, metric.help.into()),
            Kind::Counter => exporters.describe_counter(name, unit, metric.help.into()),
        }
    }
}
