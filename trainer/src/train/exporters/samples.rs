//! The metrics of a step on one rank.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ferrotitan_comm::{DeviceMesh, Op, Total};
use ferrotitan_ext::{cuda, memory};
use ferrotitan_mesh::{Dim, Mesh as _};
use ferrotitan_telemetry::metrics::table::{
    BUBBLE, CHECKPOINT_COPY, CHECKPOINT_STALL, CHECKPOINT_WRITE, COMM_BYTES, COMM_EXPOSED, DATA_SHARE, DATA_TIME,
    GRAD_NORM, LEARNING_RATE, LOSS, MAX_LOSS, MEMORY_ACTIVE, MEMORY_PROCESS, MEMORY_RESERVED, MFU, SLOWEST_RANK,
    STEP_TIME, Sample, TFLOPS, THROUGHPUT, TOKENS_SEEN, VALIDATION_LOSS,
};
use ferrotitan_telemetry::trace::{SlowRank, Waits, slow_rank as walk};
use ferrotitan_telemetry::{Coordinate, Place};
use tch::Tensor;

use crate::metrics::Record;

/// What a rank sent in each of its groups during a step, and how long it stood still for it.
pub(super) type Traffic = BTreeMap<Arc<str>, (u64, Duration)>;

/// The traffic since the recorder had these totals.
pub(super) fn traffic(mesh: &DeviceMesh, before: &BTreeMap<(Arc<str>, Op), Total>) -> Traffic {
    let mut traffic = Traffic::new();
    for (key, now) in mesh.recorder().totals() {
        let before = before.get(&key).copied().unwrap_or_default();
        let (bytes, blocked) = traffic.entry(key.0).or_default();
        *bytes += now.bytes.saturating_sub(before.bytes);
        *blocked += now.blocked.saturating_sub(before.blocked);
    }
    traffic
}

/// The samples of a step.
pub(super) fn samples(
    record: &Record,
    seen: u64,
    largest: f64,
    mesh: &DeviceMesh,
    traffic: &Traffic,
    slow: Option<SlowRank>,
) -> Vec<Sample> {
    let step = &record.step;
    let mut samples = vec![
        LOSS.is(step.loss),
        MAX_LOSS.is(largest),
        GRAD_NORM.is(step.grad_norm),
        LEARNING_RATE.is(step.lr),
        TOKENS_SEEN.is(seen as f64),
        THROUGHPUT.is(record.tps),
        TFLOPS.is(record.tflops),
        STEP_TIME.is(step.seconds),
    ];
    samples.extend(record.mfu.map(|mfu| MFU.is(mfu / 100.0)));
    for (name, value) in &step.extras {
        match name.as_str() {
            "data_seconds" => samples.extend([DATA_TIME.is(*value), DATA_SHARE.is(value / step.seconds)]),
            "validation_loss" => samples.push(VALIDATION_LOSS.is(*value)),
            "checkpoint_stall_seconds" => samples.push(CHECKPOINT_STALL.is(*value)),
            "checkpoint_copy_seconds" => samples.push(CHECKPOINT_COPY.is(*value)),
            "checkpoint_write_seconds" => samples.push(CHECKPOINT_WRITE.is(*value)),
            _ => {}
        }
    }
    if let Some(stats) = cuda::memory_stats(mesh.device()) {
        samples.extend([MEMORY_ACTIVE.is(stats.peak_allocated as f64), MEMORY_RESERVED.is(stats.peak_reserved as f64)]);
    }
    samples.extend(memory::peak_rss().into_iter().map(|bytes| MEMORY_PROCESS.is(bytes as f64)));
    for (group, (bytes, blocked)) in traffic {
        samples.push(COMM_BYTES.on(group.to_string(), *bytes as f64));
        samples.push(COMM_EXPOSED.on(group.to_string(), blocked.as_secs_f64()));
        // A stage that stands still for messages of its neighbours has nothing to do.
        if &**group == Dim::Pp.name() {
            samples.push(BUBBLE.is(blocked.as_secs_f64() / step.seconds));
        }
    }
    let path = slow.into_iter().flat_map(|slow| slow.path);
    samples.extend(path.map(|turn| SLOWEST_RANK.on(turn.dimension, turn.index as f64)));
    samples
}

/// The rank that the others waited for in a step; the same on every rank, which all ask together.
pub(super) fn slow_rank(mesh: &DeviceMesh, traffic: &Traffic) -> anyhow::Result<Option<SlowRank>> {
    let degrees = mesh.degrees();
    let dims: Vec<Dim> = Dim::ALL.into_iter().filter(|dim| degrees.get(*dim) > 1).collect();
    if dims.is_empty() {
        return Ok(None);
    }
    let groups = mesh.groups();
    // How long this rank stood still in groups whose members differ along the dimension.
    let along = |dim: &Dim| {
        let spans = |group: &str| {
            let members = groups.get(group).map(|group| group.ranks()).unwrap_or_default();
            members.iter().any(|&rank| degrees.coordinates(rank).get(*dim) != mesh.coordinate(*dim))
        };
        let waits = traffic.iter().filter(|(group, _)| spans(group)).map(|(_, (_, blocked))| blocked.as_secs_f64());
        waits.sum::<f64>()
    };
    let own: Vec<f64> = dims.iter().map(along).collect();
    let all = mesh.world().all_gather(&Tensor::from_slice(&own).to_device(mesh.device()), 0)?;
    let all = Vec::<f64>::try_from(&all.to_device(tch::Device::Cpu))?;
    let ranks = all.chunks(dims.len()).enumerate().map(|(rank, waits)| {
        let coordinates = degrees.coordinates(rank);
        let coordinate = |dim: &Dim| Coordinate {
            dimension: dim.name().to_owned(),
            index: coordinates.get(*dim),
            size: degrees.get(*dim),
        };
        // A dimension as a group of its own, of everyone who differs in it.
        let group = |dim: &Dim| (dim.name().to_owned(), (0..mesh.world_size()).collect());
        Waits {
            place: Place {
                rank,
                world_size: mesh.world_size(),
                coordinates: dims.iter().map(coordinate).collect(),
                groups: dims.iter().map(group).collect(),
            },
            by_group: dims
                .iter()
                .zip(waits)
                .map(|(dim, seconds)| (dim.name().to_owned(), duration(*seconds)))
                .collect(),
        }
    });
    Ok(walk(&ranks.collect::<Vec<_>>()))
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
