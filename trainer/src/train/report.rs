//! What the first rank tells of a run.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::Instant;

use anyhow::Context as _;
use ferrotitan_comm::DeviceMesh;
use ferrotitan_ext::{cuda, memory};
use ferrotitan_mesh::Mesh as _;

use super::held::{self, Held};
use crate::metrics::{
    Bar, Console, Cost, JsonLines, Memory, Metrics, StepMetrics, Summary, line_above_bar, peak_tflops, wants_color,
};
use crate::plan::Plan;

/// The console, `metrics.jsonl` and the progress bar of a run.
#[derive(Debug)]
pub(super) struct Report {
    metrics: Metrics,
    bar: Bar,
    began: Instant,
}

impl Report {
    /// Begins to tell of a run of which so many steps are taken, and says what each rank holds.
    pub(super) fn begin(plan: &Plan, mesh: &DeviceMesh, held: &[Held], taken: u64) -> anyhow::Result<Self> {
        tracing::info!(
            "{} parameters; {} sequences of {} tokens a step",
            plan.model.parameters(),
            plan.data.global_batch,
            plan.data.seq_len,
        );
        print(&held::table(&plan.degrees, held));
        let color = !plan.metrics.plain && wants_color(std::io::stdout().is_terminal());
        let console = Console::new(plan.metrics.log_freq, color, |line| {
            print(line);
            Ok(())
        });
        let lines = JsonLines::create(&plan.dump_folder)
            .with_context(|| format!("cannot write metrics.jsonl in {}", plan.dump_folder.display()))?;
        let metrics = Metrics::new(cost(plan, mesh)).to(console).to(lines);
        Ok(Self { metrics, bar: Bar::new(plan.steps, taken), began: Instant::now() })
    }

    /// Tells of something else.
    pub(super) fn line(&self, line: &str) {
        print(line);
    }

    /// Tells of a step.
    pub(super) fn step(&mut self, step: &StepMetrics) -> anyhow::Result<()> {
        self.metrics.log(step).context("cannot write metrics.jsonl")?;
        self.bar.set(step.step);
        Ok(())
    }

    /// Writes what the run came to.
    pub(super) fn finish(self, plan: &Plan, mesh: &DeviceMesh, held: &[Held]) -> anyhow::Result<()> {
        let mut bytes_sent = BTreeMap::new();
        for ((group, _), total) in mesh.recorder().totals() {
            *bytes_sent.entry(group.to_string()).or_default() += total.bytes;
        }
        let summary = Summary {
            ranks: mesh.world_size(),
            seconds: self.began.elapsed().as_secs_f64(),
            peak_memory: peak_memory(mesh).bytes,
            state_bytes: held.iter().map(|held| held.state()).max().unwrap_or(0),
            bytes_sent,
        };
        summary.write(&plan.dump_folder).context("cannot write summary.json")
    }
}

/// Whoever reads standard output may go away; the run does not end for that.
fn print(line: &str) {
    let _ = line_above_bar(line, || writeln!(std::io::stdout().lock(), "{line}"));
}

/// What a token costs, and what a device could do.
pub(super) fn cost(plan: &Plan, mesh: &DeviceMesh) -> Cost {
    let device = cuda::device_name(mesh.device());
    Cost {
        flops_per_token: plan.metrics.flops_per_token,
        convention: plan.metrics.convention,
        peak_tflops: plan.metrics.peak_tflops.or_else(|| peak_tflops(&device?)),
        ranks: mesh.world_size(),
    }
}

/// The most memory that this rank's device has had in use; on a CPU, that this process has.
pub(super) fn peak_memory(mesh: &DeviceMesh) -> Memory {
    match cuda::memory_stats(mesh.device()) {
        Some(stats) => Memory { bytes: stats.peak_reserved, capacity: None },
        None => Memory { bytes: memory::peak_rss().unwrap_or(0), capacity: None },
    }
}
