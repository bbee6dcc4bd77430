//! Traces of single steps: spans, collectives and pipelines of all ranks on one clock, in one file.

#[cfg(feature = "pp")]
use std::borrow::Cow;
use std::path::{Path, PathBuf};
#[cfg(feature = "pp")]
use std::time::Instant;

use anyhow::Context as _;
use ferrotitan_comm::{DeviceMesh, Mark};
use ferrotitan_mesh::Mesh as _;
#[cfg(feature = "pp")]
use ferrotitan_telemetry::trace::Track;
use ferrotitan_telemetry::trace::{Clock, Span, Spans, merge, offset};
use tch::{Kind, Tensor};

use crate::plan::TracePlan;
use crate::train::watch;

/// Times that a clock is asked for, to learn how far it is ahead.
const ROUNDS: usize = 8;

/// What takes the traces of one rank.
#[derive(Debug)]
pub(super) struct Tracer {
    plan: TracePlan,
    spans: Spans,
    mesh: DeviceMesh,
    /// Of the spans of this process.
    clock: Clock,
    /// How far rank 0's clock is ahead.
    ahead: i64,
    /// Where the collectives of the trace under way begin.
    under_way: Option<Mark>,
    stages: Vec<Span>,
}

impl Tracer {
    /// Of a rank whose clock is that of the others, unless the ranks are `apart`.
    pub(super) fn new(plan: &TracePlan, spans: Spans, mesh: &DeviceMesh, apart: bool) -> anyhow::Result<Self> {
        let clock = spans.clock();
        let ahead = if apart { ahead(mesh, &clock)? } else { 0 };
        Ok(Self { plan: plan.clone(), spans, mesh: mesh.clone(), clock, ahead, under_way: None, stages: Vec::new() })
    }

    /// A step begins.
    pub(super) fn begin(&mut self, step: u64) -> anyhow::Result<()> {
        let place = (step - 1) % self.plan.every;
        if place + self.plan.steps == self.plan.every {
            self.under_way = Some(self.mesh.recorder().mark());
            self.spans.keep(true);
            // No rank is in the step before any more.
            self.mesh.world().barrier()?;
        }
        Ok(())
    }

    /// A pipeline ran these computations.
    #[cfg(feature = "pp")]
    pub(super) fn pipeline(&mut self, began: Instant, spans: &[ferrotitan_schedule::Span]) {
        if self.under_way.is_none() {
            return;
        }
        let began = self.clock.at(began);
        let moment = |seconds: f64| began + (seconds * 1e9) as i64;
        self.stages.extend(spans.iter().map(|span| Span {
            name: Cow::Owned(span.step.to_string()),
            track: Track::Pipeline,
            begin: moment(span.start),
            end: moment(span.end),
            fields: Vec::new(),
        }));
    }

    /// A step has ended.
    pub(super) fn end(&mut self, step: u64) -> anyhow::Result<()> {
        if !step.is_multiple_of(self.plan.every) {
            return Ok(());
        }
        let Some(mark) = self.under_way.take() else { return Ok(()) };
        // Every rank has ended the step.
        self.mesh.world().barrier()?;
        self.spans.keep(false);
        let mut trace = self.spans.take(watch::place(&self.mesh));
        for event in self.mesh.recorder().since(mark) {
            trace.add_collective(&watch::record(&event, &self.clock));
        }
        trace.spans.append(&mut self.stages);
        for span in &mut trace.spans {
            (span.begin, span.end) = (span.begin + self.ahead, span.end + self.ahead);
        }
        let folder = self.plan.folder.join(format!("iteration_{step}"));
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        ferrotitan_telemetry::trace::Trace { ranks: vec![trace] }.write(&file(&folder, self.mesh.rank()))?;
        self.mesh.world().barrier()?;
        if self.mesh.rank() == 0 {
            // The run is worth more than a picture of it.
            if let Err(error) = self.conclude(&folder, step) {
                tracing::warn!("the trace of step {step}: {error:#}");
            }
        }
        Ok(())
    }

    /// Makes one file of those of the ranks, as far as they are on this machine's disks.
    fn conclude(&self, folder: &Path, step: u64) -> anyhow::Result<()> {
        let files = (0..self.mesh.world_size()).map(|rank| file(folder, rank));
        let files: Vec<PathBuf> = files.filter(|path| path.exists()).collect();
        let trace = merge(&files)?;
        let all = folder.join("trace.json");
        trace.write(&all)?;
        #[cfg(feature = "pp")]
        picture(&trace, &folder.join("pipeline.svg"))?;
        tracing::info!("trace of step {step}: {}; `ferrotitan trace summary` says where its time went", all.display());
        Ok(())
    }
}

/// As TorchTitan calls it.
fn file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank{rank}_trace.json"))
}

/// Draws the pipeline's last step as it ran, if there is one.
#[cfg(feature = "pp")]
fn picture(trace: &ferrotitan_telemetry::trace::Trace, path: &Path) -> anyhow::Result<()> {
    use ferrotitan_schedule::{Span as Bar, Timeline, render};
    let mut ranks: Vec<Vec<Bar>> = Vec::new();
    for row in ferrotitan_telemetry::trace::pipeline_rows(trace, 0) {
        if ranks.len() <= row.rank {
            ranks.resize_with(row.rank + 1, Vec::new);
        }
        let bar = Bar { step: row.action.parse()?, start: row.begin * 1e3, end: row.end * 1e3 };
        ranks[row.rank].push(bar);
    }
    if ranks.is_empty() {
        return Ok(());
    }
    let timeline = Timeline::new("as it ran", "ms", ranks)?;
    std::fs::write(path, render::svg(&timeline)).with_context(|| format!("cannot write {}", path.display()))
}

/// How far rank 0's clock is ahead of this rank's, in nanoseconds. All ranks ask together, one after the other.
fn ahead(mesh: &DeviceMesh, clock: &Clock) -> anyhow::Result<i64> {
    let (world, device) = (mesh.world(), mesh.device());
    let message = |time: i64| Tensor::from_slice(&[time]).to_device(device);
    let mut found = 0;
    for asker in 1..mesh.world_size() {
        if mesh.rank() == asker {
            let ask = || -> anyhow::Result<i64> {
                world.send(&message(0), 0)?;
                Ok(world.recv(&[1], Kind::Int64, 0)?.int64_value(&[0]))
            };
            found = offset(ROUNDS, || clock.now(), ask)?;
        } else if mesh.rank() == 0 {
            for _ in 0..ROUNDS {
                let _question = world.recv(&[1], Kind::Int64, asker)?;
                world.send(&message(clock.now()), asker)?;
            }
        }
    }
    Ok(found)
}
