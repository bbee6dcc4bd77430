//! TensorBoard's own reader reads event files back.

#![cfg(feature = "tensorboard")]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::path::Path;
use std::process::Command;

use ferrotitan_telemetry::metrics::table::{ALL, COMM_BYTES, LOSS, Sample, TOKENS_SEEN};
use ferrotitan_telemetry::metrics::{Options, Telemetry};
use serde_json::Value;

/// Prints tag, step and value of everything that TensorBoard finds in a folder.
const READ: &str = "
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0}).Reload()
tags = events.Tags()['scalars']
print(json.dumps({tag: [[e.step, repr(e.value), e.wall_time] for e in events.Scalars(tag)] for tag in tags}))
";

/// What TensorBoard finds in a folder, by tag: step and value. `None`, said, without TensorBoard.
fn read(folder: &Path) -> Option<Value> {
    let python = std::env::var_os("FERROTITAN_PYTHON").unwrap_or_else(|| "python3".into());
    let has = Command::new(&python).args(["-c", "import tensorboard"]).output();
    if !has.is_ok_and(|has| has.status.success()) {
        eprintln!("SKIPPED: no Python with tensorboard; set FERROTITAN_PYTHON to one, or run `cargo xtask test`");
        return None;
    }
    let output = Command::new(&python).args(["-c", READ]).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// Step and value of one tag.
fn series(read: &Value, tag: &str) -> Vec<(u64, f64)> {
    let events = read[tag].as_array().unwrap_or_else(|| panic!("no {tag} in {read}"));
    events.iter().map(|event| (event[0].as_u64().unwrap(), event[1].as_str().unwrap().parse().unwrap())).collect()
}

fn run(folder: &Path, steps: impl Iterator<Item = u64>, samples: impl Fn(u64) -> Vec<Sample>) {
    let options = Options { tensorboard: Some(folder.to_owned()), ..Options::default() };
    let telemetry = Telemetry::start(options, 0..1).unwrap();
    let rank = telemetry.rank(0).unwrap();
    for step in steps {
        rank.step(step, &samples(step)).unwrap();
    }
}

#[test]
fn every_metric_has_the_same_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let value = |step: u64, index: usize| (step as f64).sqrt() * 1e3 + index as f64 / 7.0;
    run(folder.path(), 1..=20, |step| {
        let mut samples: Vec<_> = ALL.iter().enumerate().map(|(index, metric)| metric.is(value(step, index))).collect();
        samples.push(COMM_BYTES.on("tp", value(step, 99)));
        samples
    });
    let Some(read) = read(folder.path()) else { return };
    assert_eq!(read.as_object().unwrap().len(), ALL.len() + 1);
    for (index, metric) in ALL.iter().enumerate() {
        // In the files a number has 32 bits.
        let expected: Vec<_> =
            (1..=20).map(|step| (step, f64::from(metric.is(value(step, index)).tag_value() as f32))).collect();
        assert_eq!(series(&read, metric.tag), expected, "{}", metric.tag);
    }
    assert_eq!(series(&read, "comm_metrics/sent(GiB)/tp").len(), 20);
}

#[test]
fn what_is_not_finite_is_read_back_too() {
    let folder = tempfile::tempdir().unwrap();
    let values = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0];
    run(folder.path(), 0..4, |step| vec![LOSS.is(values[step as usize])]);
    let Some(read) = read(folder.path()) else { return };
    let back: Vec<f64> = series(&read, LOSS.tag).into_iter().map(|(_, value)| value).collect();
    assert!(back[0].is_nan());
    assert_eq!(back[1..], values[1..]);
}

/// A run that is resumed from an earlier step adds a file, and the steps that it does again stand once.
#[test]
fn a_resumed_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), 1..=10, |step| vec![LOSS.is(step as f64), TOKENS_SEEN.is(step as f64)]);
    run(folder.path(), 7..=12, |step| vec![LOSS.is(100.0 + step as f64), TOKENS_SEEN.is(step as f64)]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    let Some(read) = read(folder.path()) else { return };
    let expected: Vec<_> = (1..=12_u64).map(|step| (step, step as f64 + if step < 7 { 0.0 } else { 100.0 })).collect();
    assert_eq!(series(&read, LOSS.tag), expected);
}

#[test]
fn all_ranks_have_folders_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { tensorboard: Some(folder.path().to_owned()), all_ranks: true, ..Options::default() };
    let telemetry = Telemetry::start(options, 0..1).unwrap();
    for rank in 0..2 {
        telemetry.rank(rank).unwrap().step(1, &[LOSS.is(rank as f64)]).unwrap();
    }
    let Some(first) = read(&folder.path().join("rank_0")) else { return };
    assert_eq!(series(&first, LOSS.tag), [(1, 0.0)]);
    assert_eq!(series(&read(&folder.path().join("rank_1")).unwrap(), LOSS.tag), [(1, 1.0)]);
}
