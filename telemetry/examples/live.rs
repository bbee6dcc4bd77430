//! A made-up run, to look at the exporters and the live view without a model.
//!
//! ```sh
//! cargo run -p ferrotitan-telemetry --all-features --example live -- --prometheus 127.0.0.1:9464 --tensorboard tb
//! ```
//!
//! `--prometheus ADDRESS`, `--otlp ENDPOINT` and `--tensorboard FOLDER` switch exporters on, `--steps N` says how long it
//! runs (four steps a second). On a terminal it shows the live view, otherwise one line a step.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::time::Duration;

use ferrotitan_telemetry::metrics::table::{
    COMM_BYTES, GRAD_NORM, LEARNING_RATE, LOSS, MEMORY_RESERVED, MEMORY_RESERVED_SHARE, MFU, STEP_TIME, THROUGHPUT,
    TOKENS_SEEN,
};
use ferrotitan_telemetry::metrics::{Options, Otlp, Telemetry};
use ferrotitan_telemetry::report::Phase;
use ferrotitan_telemetry::tui::{RankState, Tui, View};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = Options::default();
    let mut steps = 400_u64;
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--prometheus" => options.prometheus = Some(value.parse()?),
            "--otlp" => options.otlp = Some(Otlp { endpoint: Some(value), protocol: None }),
            "--tensorboard" => options.tensorboard = Some(value.into()),
            "--steps" => steps = value.parse()?,
            _ => return Err(format!("there is no option {word}").into()),
        }
    }
    let view = View::new("made-up run", steps);
    options.view = Some(view.clone());
    let telemetry = Telemetry::start(options, 0..1)?;
    let rank = telemetry.rank(0)?;
    let tui = Tui::start(view.clone());
    if let Err(error) = &tui {
        eprintln!("{error}");
    }
    for step in 1..=steps {
        for phase in [Phase::Data, Phase::Forward, Phase::Backward, Phase::Optimizer] {
            for rank in 0..4 {
                let place = format!("pp {}, tp {}", rank / 2, rank % 2);
                let collective = format!("all-reduce #{} on tp", step * 12 + phase as u64);
                view.rank(rank, RankState { place, step, phase, collective });
            }
            std::thread::sleep(Duration::from_millis(60));
        }
        let loss = 2.0 + 9.0 / (step as f64).powf(0.4) + 0.1 * (step as f64 * 0.7).sin();
        let rate = 12_000.0 + 900.0 * (step as f64 * 0.3).sin();
        rank.step(
            step,
            &[
                LOSS.is(loss),
                GRAD_NORM.is(1.0 + 1.0 / step as f64),
                LEARNING_RATE.is(3e-4 * (step as f64 / 100.0).min(1.0)),
                TOKENS_SEEN.is((step * 32_768) as f64),
                THROUGHPUT.is(rate),
                MFU.is(rate / 30_000.0),
                STEP_TIME.is(0.25),
                MEMORY_RESERVED.is(61e9),
                MEMORY_RESERVED_SHARE.is(0.71),
                COMM_BYTES.on("tp", 4e9),
                COMM_BYTES.on("dp_shard", 9e9),
            ],
        )?;
        let line = format!("step: {step:2}  loss: {loss:7.4}  tps: {rate:.0}");
        if !view.line(&line) {
            println!("{line}");
        }
    }
    drop(tui);
    telemetry.finish(Duration::from_secs(5))?;
    Ok(())
}
