//! What metrics cost the thread that trains: `cargo bench -p ferrotitan-telemetry --all-features --bench step`.
//!
//! Prints microseconds a step of some thirty samples, with no exporter, with each one, and with all of them; and
//! microseconds a span, without a subscriber and with OTLP. Nobody answers the address that OTLP sends to.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::time::Instant;

use ferrotitan_telemetry::metrics::table::{ALL, COMM_BYTES, COMM_EXPOSED, COMM_TIME, Sample};
use ferrotitan_telemetry::metrics::{Options, Otlp, OtlpProtocol, Telemetry};
use ferrotitan_telemetry::tui::View;
use tracing_subscriber::layer::SubscriberExt as _;

const STEPS: u64 = 2000;

fn samples(step: u64) -> Vec<Sample> {
    let scalars = ALL.iter().filter(|metric| ![COMM_BYTES, COMM_TIME, COMM_EXPOSED].contains(metric));
    let mut samples: Vec<Sample> = scalars.map(|metric| metric.is(step as f64)).collect();
    for dimension in ["pp", "dp_shard", "tp"] {
        for metric in [COMM_BYTES, COMM_TIME, COMM_EXPOSED] {
            samples.push(metric.on(dimension, step as f64));
        }
    }
    samples
}

fn measure(name: &str, options: Options) {
    let telemetry = Telemetry::start(options, 0..1).unwrap();
    let rank = telemetry.rank(0).unwrap();
    let mut times: Vec<f64> = (1..=STEPS)
        .map(|step| {
            let began = Instant::now();
            rank.step(step, &samples(step)).unwrap();
            began.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let (median, mean) = (times[times.len() / 2], times.iter().sum::<f64>() / times.len() as f64);
    println!("{name:12} {median:8.1} us a step (median), {mean:8.1} us (mean)");
    let _ = telemetry.finish(std::time::Duration::ZERO);
}

fn spans(layer: &str) {
    let began = Instant::now();
    for number in 0..STEPS {
        tracing::info_span!(target: "ferrotitan::span", "forward", number).in_scope(|| {});
    }
    println!("{layer:12} {:8.2} us a span (mean)", began.elapsed().as_secs_f64() * 1e6 / STEPS as f64);
}

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let prometheus = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().ok();
    let otlp = Some(Otlp { endpoint: Some("http://127.0.0.1:9".to_owned()), protocol: Some(OtlpProtocol::Grpc) });
    let tensorboard = Some(folder.path().to_owned());
    let view = Some(View::new("bench", STEPS));
    println!("{} samples a step", samples(1).len());
    measure("none", Options::default());
    measure("prometheus", Options { prometheus, ..Options::default() });
    measure("otlp", Options { otlp: otlp.clone(), ..Options::default() });
    measure("tensorboard", Options { tensorboard: tensorboard.clone(), ..Options::default() });
    measure("view", Options { view: view.clone(), ..Options::default() });
    spans("none");
    let telemetry = Telemetry::start(Options { otlp: otlp.clone(), ..Options::default() }, 0..1).unwrap();
    let subscriber = tracing_subscriber::registry().with(telemetry.span_layer());
    tracing::subscriber::with_default(subscriber, || telemetry.rank(0).unwrap().run(|| spans("otlp")));
    let _ = telemetry.finish(std::time::Duration::ZERO);
    measure("all", Options { all_ranks: false, prometheus, otlp, tensorboard, view });
}
