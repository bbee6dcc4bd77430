//! Four processes, one of which does what it should not: the report names the rank, the dimension and the operation.
#![cfg(feature = "telemetry")]
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ferrotitan_comm::{DeviceMesh, ReduceOp, processes};
use ferrotitan_mesh::{Degrees, Mesh as _, View};
use ferrotitan_trainer::launch::{Ended, Machines, Outcome, Prefix, Sink, Spec, follow_parent, launch};
use ferrotitan_trainer::plan::{Backend, CommPlan};
use ferrotitan_trainer::train::watch::{self, Phase, Rank, Watch};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// How long a rank waits for others.
const TIMEOUT: Duration = Duration::from_secs(4);

fn plan(folder: &Path) -> CommPlan {
    CommPlan {
        backend: Backend::Processes,
        init_timeout: Duration::from_secs(60),
        train_timeout: TIMEOUT,
        trace_buffer: 200,
        records: folder.join("comm_traces"),
        record_prefix: "rank_".into(),
        verify: false,
    }
}

/// A mesh of two by two, six steps of which the third goes wrong on one rank.
#[test]
#[ignore = "no test of its own: the tests below start it as a rank"]
fn rank() {
    follow_parent();
    tch::set_num_threads(1);
    let (folder, fault) = (PathBuf::from(env::var_os("HANG_FOLDER").unwrap()), env::var("HANG_FAULT").unwrap());
    let watch = Watch::new(&plan(&folder), false).unwrap();
    watch.on_signals();
    let options = processes::Options {
        connect_timeout: Duration::from_secs(60),
        timeout: TIMEOUT,
        device: Some(Device::Cpu),
        // Without it, Gloo ends the processes of ranks that bring different shapes.
        verify: fault == "shape",
        on_failure: Some(watch.on_failure()),
        ..processes::Options::default()
    };
    let degrees = Degrees { dp_shard: 2, tp: 2, ..Degrees::default() };
    let ran = processes::run(degrees, &options, |mesh| {
        let rank = watch.join(&mesh);
        let number = mesh.rank();
        let strike = |name: &str, on: usize, step: u64| {
            let strikes = fault == name && number == on && step == 3;
            if strikes {
                std::fs::write(folder.join("struck"), now().to_string()).unwrap();
            }
            strikes
        };
        train(&mesh, &rank, strike).inspect_err(|error| rank.failed(&error.to_string()))
    });
    std::process::exit(i32::from(ran.is_err()));
}

fn train(mesh: &DeviceMesh, rank: &Rank, strikes: impl Fn(&str, usize, u64) -> bool) -> ferrotitan_comm::Result<()> {
    let (tp, shards) = (mesh.group(View::TP)?, mesh.group(View::DP_SHARD)?);
    let of = |length: i64| Tensor::ones([length], (Kind::Float, Device::Cpu));
    for step in 1..=6 {
        rank.step(step);
        rank.at(Phase::Data);
        if strikes("data", 3, step) {
            thread::sleep(Duration::from_secs(60));
        }
        rank.at(Phase::Forward);
        if strikes("sleep", 1, step) {
            thread::sleep(Duration::from_secs(60));
        }
        if strikes("death", 2, step) {
            Command::new("kill").args(["-KILL", &std::process::id().to_string()]).status().unwrap();
        }
        let length = if strikes("shape", 1, step) { 10 } else { 8 };
        if !strikes("skip", 3, step) {
            let _ = tp.all_reduce(&of(length), ReduceOp::Sum)?;
        }
        rank.at(Phase::Backward);
        let _ = shards.reduce_scatter(&of(6), 0)?;
        rank.at(Phase::Optimizer);
        mesh.world().all_reduce_scalar(1.0, ReduceOp::Max)?;
    }
    Ok(())
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs four ranks with a fault; gives the report in words, and its first finding.
fn report(fault: &str) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let lines = Lines::default();
    let script = "HANG_FAULT=$1 HANG_FOLDER=$2 exec \"$0\" --exact rank --ignored --nocapture --test-threads=1";
    let exe = env::current_exe().unwrap();
    let spec = Spec {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into(), exe.into(), fault.into(), folder.path().into()],
        ranks: 4,
        machines: Machines::default(),
        grace: Duration::from_secs(3),
        prefix: Prefix { color: false },
        stdout: Sink::new(lines.clone()),
        stderr: Sink::new(lines.clone()),
    };
    let Ended { outcome, ranks } = launch(&spec).unwrap();
    let took = now() - std::fs::read_to_string(folder.path().join("struck")).unwrap().parse::<f64>().unwrap();
    let told = String::from_utf8_lossy(&lines.0.lock().unwrap()).into_owned();
    assert!(matches!(outcome, Outcome::Died { .. }), "{outcome:?}\n{told}");
    let plan = plan(folder.path());
    let text = watch::conclude(&plan, &ranks, 4).unwrap_or_else(|| panic!("there is no report\n{told}"));
    println!("{fault}, {took:.1} s\n{text}");
    let limit = TIMEOUT + Duration::from_secs(5);
    assert!(took < limit.as_secs_f64(), "it took {took} s\n{told}");
    let json = std::fs::read(plan.records.join("report.json")).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    assert!(std::fs::read_to_string(plan.records.join("report.txt")).is_ok_and(|file| text.starts_with(&file)));
    (text, json["findings"][0].clone())
}

/// Checks a finding: its cause, its ranks, and the operation and group that they are missed in.
fn check(
    (text, finding): (String, Value),
    cause: &str,
    ranks: &[usize],
    op: &str,
    group: &str,
    sequence: u64,
) -> String {
    assert_eq!(finding["cause"], cause, "{text}");
    assert_eq!(finding["ranks"], serde_json::json!(ranks), "{text}");
    let missed = &finding["missed"];
    assert_eq!((&missed["op"], &missed["group"]), (&op.into(), &group.into()), "{text}");
    assert_eq!(missed["sequence"], sequence, "{text}");
    finding["says"].as_str().unwrap().to_owned()
}

#[test]
fn a_rank_stuck_in_data_loading_among_processes() {
    let says = check(report("data"), "stuck", &[3], "all-reduce", "tp", 2);
    let begin = "rank 3 (dp_shard 1, tp 1) has not entered all-reduce #2 on tp; it is in the data loader since ";
    assert!(says.starts_with(begin) && says.ends_with(", at step 3; ranks 0 to 2 wait"), "{says}");
}

#[test]
fn a_rank_that_sleeps_among_processes() {
    let says = check(report("sleep"), "stuck", &[1], "all-reduce", "tp", 2);
    assert!(says.contains("it is in the forward pass since") && says.ends_with("ranks 0, 2 and 3 wait"), "{says}");
}

#[test]
fn a_rank_that_skips_a_collective_among_processes() {
    let says = check(report("skip"), "circle", &[3], "all-reduce", "tp", 2);
    assert!(
        says.contains("has not entered all-reduce #2 on tp; rank 3 waits for ranks 0 and 2 in all-reduce"),
        "{says}"
    );
}

#[test]
fn a_rank_with_another_shape_among_processes() {
    let says = check(report("shape"), "mismatch", &[1], "all-reduce", "tp", 2);
    assert!(says.contains("another shape") && says.contains("[10]") && says.contains("[8]"), "{says}");
}

#[test]
fn a_rank_that_dies_among_processes() {
    let says = check(report("death"), "died", &[2], "all-reduce", "tp", 2);
    assert!(says.starts_with("rank 2 (dp_shard 1, tp 0) was killed by SIGKILL"), "{says}");
}
