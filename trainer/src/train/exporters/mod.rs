//! What a process exports of its ranks while they run: metrics, spans, traces, and the live view.

mod samples;
mod traces;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
#[cfg(feature = "pp")]
use std::time::Instant;

use ferrotitan_comm::{DeviceMesh, Op, Total};
use ferrotitan_mesh::Mesh as _;
use ferrotitan_telemetry::metrics::{Options, Otlp, OtlpProtocol, RankMetrics, Telemetry};
use ferrotitan_telemetry::trace::{Clock, Spans};
use ferrotitan_telemetry::tui::{Tui, View};
use tracing_subscriber::{Layer, Registry};

use crate::config::sections;
use crate::metrics::{Record, show_lines};
use crate::plan::{Backend, Plan};
use samples::Traffic;
use traces::Tracer;

/// How long the end of a run waits for what is still to be sent.
const PATIENCE: Duration = Duration::from_secs(5);

/// The exporters of a process.
#[derive(Debug)]
pub struct Exporters {
    telemetry: Telemetry,
    spans: Spans,
    view: Option<View>,
    tui: Option<Tui>,
}

impl Exporters {
    /// Starts those that the plan asks for, for the ranks of this process, and the `live` view.
    ///
    /// # Errors
    /// When an address is taken or wrong, a folder cannot be written, or there is no terminal for the view.
    pub fn start(plan: &Plan, ranks: Range<usize>, live: bool) -> anyhow::Result<Self> {
        let view = live.then(|| View::new(&plan.description, plan.steps));
        let asked = &plan.telemetry;
        let protocol = |protocol| match protocol {
            sections::OtlpProtocol::Grpc => OtlpProtocol::Grpc,
            sections::OtlpProtocol::HttpProtobuf => OtlpProtocol::Http,
        };
        let otlp = asked.otlp.as_ref();
        let options = Options {
            all_ranks: asked.all_ranks,
            prometheus: asked.prometheus,
            otlp: otlp.map(|otlp| Otlp { endpoint: otlp.endpoint.clone(), protocol: otlp.protocol.map(protocol) }),
            tensorboard: asked.tensorboard.clone(),
            view: view.clone(),
        };
        let telemetry = Telemetry::start(options, ranks)?;
        let tui = view.clone().map(Tui::start).transpose()?;
        if let Some(view) = view.clone() {
            show_lines(move |line| view.line(line));
        }
        Ok(Self { telemetry, spans: Spans::new(Clock::start()), view, tui })
    }

    /// What listens to this process' spans.
    pub fn layers(&self) -> Vec<Box<dyn Layer<Registry> + Send + Sync>> {
        let mut layers: Vec<Box<dyn Layer<Registry> + Send + Sync>> = vec![Box::new(self.spans.layer())];
        layers.extend(self.telemetry.span_layer());
        layers
    }

    /// The live view, if there is one.
    pub(super) fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// What one rank exports.
    pub(super) fn rank(&self, plan: &Plan, mesh: &DeviceMesh) -> anyhow::Result<RankExporter> {
        let traces = plan.telemetry.traces.as_ref();
        // Threads have one clock.
        let apart = plan.comm.backend == Backend::Processes;
        let tracer = traces.map(|traces| Tracer::new(traces, self.spans.clone(), mesh, apart)).transpose()?;
        Ok(RankExporter {
            metrics: self.telemetry.rank(mesh.rank())?,
            exports: plan.telemetry.exports() || self.view.is_some(),
            often: plan.metrics.log_freq,
            mesh: mesh.clone(),
            began: BTreeMap::new(),
            traffic: Traffic::new(),
            tracer,
        })
    }

    /// Sends what has not been sent yet.
    pub fn finish(self) {
        // The terminal is the console's again.
        drop(self.tui);
        if let Err(error) = self.telemetry.finish(PATIENCE) {
            tracing::warn!("{error}");
        }
    }
}

/// What one rank exports. Every rank has one, and all call it alike.
#[derive(Debug)]
pub(super) struct RankExporter {
    metrics: RankMetrics,
    exports: bool,
    /// Steps from one look at who waits for whom to the next.
    often: u64,
    mesh: DeviceMesh,
    /// The totals of collectives when the step began.
    began: BTreeMap<(Arc<str>, Op), Total>,
    /// What was sent in the step.
    traffic: Traffic,
    tracer: Option<Tracer>,
}

impl RankExporter {
    /// Runs a rank: what it records on this thread is its own.
    pub(super) fn run<T>(&mut self, body: impl FnOnce(&mut Self) -> T) -> T {
        Spans::enter_rank(self.mesh.rank());
        self.metrics.clone().run(|| body(self))
    }

    /// Whether somebody looks at the metrics.
    pub(super) fn exports(&self) -> bool {
        self.exports
    }

    /// The passes of a step and its update are done. What follows is not of the step.
    pub(super) fn stepped(&mut self) {
        if self.exports {
            self.traffic = samples::traffic(&self.mesh, &self.began);
        }
    }

    /// A step begins.
    pub(super) fn begin(&mut self, step: u64) -> anyhow::Result<()> {
        if self.exports {
            self.began = self.mesh.recorder().totals();
        }
        match &mut self.tracer {
            Some(tracer) => tracer.begin(step),
            None => Ok(()),
        }
    }

    /// A pipeline ran these computations, since this moment.
    #[cfg(feature = "pp")]
    pub(super) fn pipeline(&mut self, began: Instant, spans: &[ferrotitan_schedule::Span]) {
        if let Some(tracer) = &mut self.tracer {
            tracer.pipeline(began, spans);
        }
    }

    /// A step has ended, with this record and the largest mean loss of a rank.
    pub(super) fn end(&mut self, record: &Record, seen: u64, largest: f64) -> anyhow::Result<()> {
        if let Some(tracer) = &mut self.tracer {
            tracer.end(record.step.step)?;
        }
        if !self.exports {
            return Ok(());
        }
        let step = record.step.step;
        let slow = match step == 1 || step.is_multiple_of(self.often) {
            true => samples::slow_rank(&self.mesh, &self.traffic)?,
            false => None,
        };
        let samples = samples::samples(record, seen, largest, &self.mesh, &self.traffic, slow);
        Ok(self.metrics.step(step, &samples)?)
    }
}
