//! Draws a schedule: `cargo run --example picture -- NAME RANKS STAGES_PER_RANK MICROBATCHES FILE`.

use std::error::Error;

use ferrotitan_schedule::{Algorithm, Costs, render, verify};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, ranks, stages_per_rank, microbatches, file] = arguments.as_slice() else {
        return Err("usage: picture NAME RANKS STAGES_PER_RANK MICROBATCHES FILE".into());
    };
    let stages_per_rank = stages_per_rank.parse()?;
    let schedule = name.parse::<Algorithm>()?.generate(ranks.parse()?, stages_per_rank, microbatches.parse()?)?;
    let report = verify(&schedule, &Costs::per_rank(stages_per_rank))?;
    std::fs::write(file, render::svg(&report.timeline))?;
    Ok(())
}
