//! The Prometheus endpoint, read by itself and by a Prometheus server.

#![cfg(feature = "prometheus")]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferrotitan_telemetry::metrics::table::{COMM_BYTES, LOSS, MFU, TOKENS_SEEN};
use ferrotitan_telemetry::metrics::{Options, Telemetry};

/// An address that was free a moment ago.
fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The body that a GET is answered with; nothing while nobody answers.
fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

fn options(address: SocketAddr, all_ranks: bool) -> Options {
    Options { prometheus: Some(address), all_ranks, ..Options::default() }
}

#[test]
fn each_series_says_its_rank_and_dimension() {
    let address = free();
    let telemetry = Telemetry::start(options(address, true), 0..2).unwrap();
    for rank in 0..2 {
        let metrics = telemetry.rank(rank).unwrap();
        metrics.step(1, &[LOSS.is(9.0), TOKENS_SEEN.is(1000.0)]).unwrap();
        metrics.step(2, &[LOSS.is(2.5 + rank as f64), TOKENS_SEEN.is(2000.0), COMM_BYTES.on("tp", 1e9)]).unwrap();
        metrics.run(|| {
            metrics::counter!("ferrotitan_retries_total", "store" => "s3").increment(3);
            metrics::histogram!("ferrotitan_read_seconds").record(0.25);
        });
    }
    let body = get(address, "/metrics").unwrap();
    for line in [
        "# HELP ferrotitan_loss Mean loss of the valid tokens of the global batch, in nats",
        "# TYPE ferrotitan_loss gauge",
        "ferrotitan_loss{rank=\"0\"} 2.5",
        "ferrotitan_loss{rank=\"1\"} 3.5",
        "# TYPE ferrotitan_tokens_seen_total counter",
        "ferrotitan_tokens_seen_total{rank=\"0\"} 2000",
        "ferrotitan_comm_sent_bytes{dimension=\"tp\",rank=\"1\"} 1000000000",
        "ferrotitan_retries_total{store=\"s3\",rank=\"1\"} 3",
        "ferrotitan_read_seconds_count{rank=\"0\"} 1",
    ] {
        assert!(body.lines().any(|known| known == line), "no {line:?} in\n{body}");
    }
    drop(telemetry);
    let until = Instant::now() + Duration::from_secs(5);
    while TcpListener::bind(address).is_err() {
        assert!(Instant::now() < until, "the address stays taken after the end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn other_ranks_are_silent_unless_all_are_exported() {
    let address = free();
    let telemetry = Telemetry::start(options(address, false), 0..3).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let metrics = telemetry.rank(rank).unwrap();
            scope.spawn(move || {
                metrics.run(|| metrics::gauge!("ferrotitan_queue").set(rank as f64));
                metrics.step(1, &[LOSS.is(rank as f64)]).unwrap();
            });
        }
    });
    let body = get(address, "/metrics").unwrap();
    let mut series: Vec<_> = body.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    series.sort_unstable();
    assert_eq!(series, ["ferrotitan_loss{rank=\"0\"} 0", "ferrotitan_queue{rank=\"0\"} 0"]);
}

/// Ends the server with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_prometheus_server_reads_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let (scraped, served) = (free(), free());
    let config = folder.path().join("prometheus.yml");
    let text = format!(
        "global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}\n\
         scrape_configs: [{{job_name: run, static_configs: [{{targets: ['{scraped}']}}]}}]\n"
    );
    std::fs::write(&config, text).unwrap();
    let started = Command::new("prometheus")
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
        .arg(format!("--web.listen-address={served}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(child) = started else {
        eprintln!("SKIPPED: no `prometheus` on the path");
        return;
    };
    let mut server = Server(child);
    let telemetry = Telemetry::start(options(scraped, false), 0..1).unwrap();
    let rank = telemetry.rank(0).unwrap();
    let samples =
        [LOSS.is(1.0 / 3.0), MFU.is(0.41), TOKENS_SEEN.is(123_456_789.0), COMM_BYTES.on("dp_shard", 7_654_321.0)];
    rank.step(1, &samples).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    for (query, expected) in [
        ("ferrotitan_loss", 1.0 / 3.0),
        ("ferrotitan_mfu_ratio", 0.41),
        ("ferrotitan_tokens_seen_total", 123_456_789.0),
        ("ferrotitan_comm_sent_bytes%7Bdimension%3D%22dp_shard%22%7D", 7_654_321.0),
    ] {
        let value = loop {
            assert!(server.0.try_wait().unwrap().is_none(), "the server has ended");
            assert!(Instant::now() < until, "the server does not know {query}");
            let answer = get(served, &format!("/api/v1/query?query={query}")).unwrap_or_default();
            let answer: serde_json::Value = serde_json::from_str(body(&answer)).unwrap_or_default();
            let result = &answer["data"]["result"][0];
            if let Some(value) = result["value"][1].as_str() {
                assert_eq!(result["metric"]["rank"], "0");
                assert_eq!(result["metric"]["job"], "run");
                break value.parse::<f64>().unwrap();
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        assert_eq!(value, expected, "{query}");
    }
}

/// The JSON in a body that may come in chunks.
fn body(answer: &str) -> &str {
    match (answer.find('{'), answer.rfind('}')) {
        (Some(from), Some(to)) => &answer[from..=to],
        _ => answer,
    }
}
