//! In place of `exporters`, in a build without `telemetry`: a run tells of itself on the console and in `metrics.jsonl`.

use std::ops::Range;

use anyhow::ensure;
use ferrotitan_comm::DeviceMesh;
use tracing_subscriber::{Layer, Registry};

use crate::metrics::Record;
use crate::plan::Plan;

#[derive(Debug)]
pub struct Exporters;

impl Exporters {
    pub fn start(_: &Plan, _ranks: Range<usize>, live: bool) -> anyhow::Result<Self> {
        ensure!(!live, "the live view is not in this build, which is without the feature `telemetry`");
        Ok(Self)
    }

    pub fn layers(&self) -> Vec<Box<dyn Layer<Registry> + Send + Sync>> {
        Vec::new()
    }

    pub(super) fn rank(&self, _: &Plan, _: &DeviceMesh) -> anyhow::Result<RankExporter> {
        Ok(RankExporter)
    }

    pub fn finish(self) {}
}

#[derive(Debug)]
pub(super) struct RankExporter;

impl RankExporter {
    pub(super) fn run<T>(&mut self, body: impl FnOnce(&mut Self) -> T) -> T {
        body(self)
    }

    pub(super) fn exports(&self) -> bool {
        false
    }

    pub(super) fn stepped(&mut self) {}

    pub(super) fn begin(&mut self, _step: u64) -> anyhow::Result<()> {
        Ok(())
    }

    #[cfg(feature = "pp")]
    pub(super) fn pipeline(&mut self, _began: std::time::Instant, _: &[ferrotitan_schedule::Span]) {}

    pub(super) fn end(&mut self, _: &Record, _seen: u64, _largest: f64) -> anyhow::Result<()> {
        Ok(())
    }
}
