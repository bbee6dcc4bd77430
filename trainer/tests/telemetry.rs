//! What a run exports while it runs, and that it changes nothing.
#![cfg(feature = "telemetry")]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::{Run, finish};

/// Two stages of two shards.
fn run() -> Run {
    Run::new()
        .set("parallelism.pipeline_parallel_degree", 2)
        .set("parallelism.data_parallel_shard_degree", 2)
        .set("training.steps", 6)
        .set("metrics.log_freq", 2)
}

fn traced(run: Run) -> Run {
    run.set("profiling.enable_profiling", "true").set("profiling.profile_freq", 3).set("profiling.profiler_active", 2)
}

/// A port that is free now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn trace_command(words: &[&str], path: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotitan"));
    command.arg("trace").args(words).arg(path).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = finish(command.spawn().unwrap(), Duration::from_secs(60));
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

fn assert_traces(run: &Run) {
    for step in [3, 6] {
        let folder = run.path("out/profile_traces").join(format!("iteration_{step}"));
        let trace = folder.join("trace.json");
        let value: serde_json::Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let named = |name: &str| events.iter().filter(|event| event["name"] == name && event["ph"] == "X").count();
        // Two steps of four ranks.
        assert_eq!((named("step"), named("optimizer")), (8, 8));
        assert!(named("all-gather") > 0 && named("wait") > 0 && named("0F0") > 0, "{}", trace.display());
        let (code, said) = trace_command(&["summary"], &trace);
        assert_eq!(code, Some(0), "{said}");
        for word in ["rank", "bubble", "dp_shard"] {
            assert!(said.contains(word), "{word} is missing in:\n{said}");
        }
        let picture = std::fs::read_to_string(folder.join("pipeline.svg")).unwrap();
        assert!(picture.starts_with("<svg") && picture.contains("1F0"));
    }
}

#[test]
fn exporters_change_nothing_and_traces_hold_all_ranks() {
    let plain = run();
    let before = plain.steps();
    let run = traced(run())
        .set("metrics.enable_tensorboard", "true")
        .set("metrics.enable_prometheus", "true")
        .set("metrics.prometheus_address", format!("127.0.0.1:{}", free_port()))
        .set("metrics.enable_otlp", "true")
        // Nobody answers there.
        .set("metrics.otlp_endpoint", format!("http://127.0.0.1:{}", free_port()));
    let steps = run.steps();
    for (with, without) in steps.iter().zip(&before) {
        assert_eq!((with.loss, with.grad_norm), (without.loss, without.grad_norm));
    }
    assert_traces(&run);
    let events = std::fs::read_dir(run.path("out/tb")).unwrap().map(|entry| entry.unwrap());
    let bytes: u64 = events.map(|entry| entry.metadata().unwrap().len()).sum();
    assert!(bytes > 1000, "{bytes}");
}

#[test]
fn traces_of_processes_are_one() {
    let run = traced(run()).set("comm.backend", "processes");
    run.steps();
    assert_traces(&run);
}

#[test]
fn prometheus_sees_the_numbers_of_metrics_jsonl() {
    let port = free_port();
    let run = run()
        .set("training.steps", 200)
        .set("metrics.enable_prometheus", "true")
        .set("metrics.save_for_all_ranks", "true")
        .set("metrics.prometheus_address", format!("127.0.0.1:{port}"));
    let mut child = run.start();
    let began = Instant::now();
    let scrape = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    let page = loop {
        match scrape() {
            Ok(page) if page.contains("ferrotitan_slowest_rank") => break page,
            _ if began.elapsed() > Duration::from_secs(60) || child.try_wait().unwrap().is_some() => {
                let output = finish(child, Duration::from_secs(60));
                panic!("never scraped: {}", String::from_utf8_lossy(&output.stderr));
            }
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let value = |series: &str| {
        let line = page.lines().find(|line| line.starts_with(series)).unwrap_or_else(|| panic!("{series} in {page}"));
        line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
    };
    // The loss of one of the steps, to the last digit, and every rank's traffic.
    let losses: Vec<f64> = support::read_steps(&run.path("out/metrics.jsonl")).iter().map(|step| step.loss).collect();
    let loss = value("ferrotitan_loss{rank=\"0\"}");
    assert!(losses.contains(&loss), "{loss} {losses:?}");
    assert!(value("ferrotitan_loss_max{rank=\"0\"}") >= loss);
    for rank in 0..4 {
        assert!(page.contains(&format!("rank=\"{rank}\"")), "rank {rank} in {page}");
    }
    assert!(page.contains("dimension=\"pp\"") && page.contains("ferrotitan_pipeline_bubble_ratio"), "{page}");
}

#[test]
fn mistakes_are_said_at_the_start() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let run = run().set("metrics.enable_prometheus", "true").set("metrics.prometheus_address", address);
    let said = run.error();
    assert!(said.contains(&address.to_string()), "{said}");
    let run = run.set("metrics.prometheus_address", "here").set("profiling.enable_profiling", "true");
    let run = run.set("profiling.profiler_active", 11);
    let said = run.error();
    for word in ["prometheus_address", "profiler_active", "profile_freq"] {
        assert!(said.contains(word), "{word} is missing in:\n{said}");
    }
}
