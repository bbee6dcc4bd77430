//! `ferrotitan schedule`: draws a pipeline schedule, or verifies and draws one from a file.

use super::Usage;
use super::console::{print, say};
use anyhow::Context as _;
use clap::Args;
use ferrotitan_schedule::{Algorithm, Costs, Schedule, render, verify};
use std::path::Path;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(super) struct ScheduleArgs {
    /// A schedule by PyTorch's or TorchTitan's name (1F1B, Interleaved1F1B, ZBVZeroBubble, …), or a CSV file in PyTorch's
    /// form.
    name: String,
    /// Pipeline ranks; a file says them itself.
    #[arg(long, value_name = "RANKS")]
    pp: Option<usize>,
    /// Microbatches of a step; a file says them itself.
    #[arg(long, value_name = "N")]
    microbatches: Option<usize>,
    /// Stages of each rank; as many as the schedule is made for if not given.
    #[arg(long, value_name = "N")]
    stages_per_rank: Option<usize>,
    /// A picture in text, an SVG, or the schedule as CSV.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Time of a stage's forward pass.
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    forward_cost: f64,
    /// Time of a stage's input gradient.
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    input_gradient_cost: f64,
    /// Time of a stage's weight gradient. A full backward pass takes both.
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    weight_gradient_cost: f64,
    /// Time of sending activations or their gradients to another rank.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    communication_cost: f64,
    /// How much of the shorter half of an overlapped pair is hidden, from 0 to 1.
    #[arg(long, value_name = "PART", default_value_t = 0.0)]
    overlap: f64,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Format {
    Text,
    Csv,
    Svg,
}

/// Verifies the schedule, draws it on standard output, and gives its figures on standard error.
pub(super) fn run(args: &ScheduleArgs) -> anyhow::Result<ExitCode> {
    let schedule = if Path::new(&args.name).is_file() { read(args)? } else { generate(args)? };
    let costs = Costs {
        forward: args.forward_cost,
        input_gradient: args.input_gradient_cost,
        weight_gradient: args.weight_gradient_cost,
        communication: args.communication_cost,
        overlap: args.overlap,
        ..Costs::default()
    };
    let report = verify(&schedule, &costs).with_context(|| format!("schedule {} is unsound", schedule.name))?;
    print(&match args.format {
        Format::Text => render::text(&report.timeline),
        Format::Csv => schedule.to_csv(),
        Format::Svg => render::svg(&report.timeline),
    });
    let held: Vec<String> = report.ranks.iter().map(|rank| rank.peak_live.to_string()).collect();
    say(&format!(
        "{}: makespan {:.3}, {:.1} % of it over the ideal {:.3}; activations of at most {} stages held, by rank",
        schedule.name,
        report.timeline.makespan(),
        100.0 * report.timeline.bubble_ratio(),
        report.timeline.ideal(),
        held.join(", "),
    ));
    Ok(ExitCode::SUCCESS)
}

fn generate(args: &ScheduleArgs) -> anyhow::Result<Schedule> {
    let algorithm: Algorithm =
        args.name.parse().with_context(|| format!("{} is no file and no schedule", args.name))?;
    let (Some(ranks), Some(microbatches)) = (args.pp, args.microbatches) else {
        return Err(Usage(format!("{} needs --pp and --microbatches", args.name)).into());
    };
    let stages = args.stages_per_rank.unwrap_or_else(|| algorithm.default_stages_per_rank());
    Ok(algorithm.generate(ranks, stages, microbatches)?)
}

/// A file, which has to agree with whatever the command line says of it.
fn read(args: &ScheduleArgs) -> anyhow::Result<Schedule> {
    let text = std::fs::read_to_string(&args.name).with_context(|| args.name.clone())?;
    let schedule = Schedule::from_csv(&args.name, &text).with_context(|| args.name.clone())?;
    let found = [
        ("--pp", args.pp, schedule.ranks.len()),
        ("--microbatches", args.microbatches, schedule.microbatches),
        ("--stages-per-rank", args.stages_per_rank, schedule.stages() / schedule.ranks.len().max(1)),
    ];
    for (flag, said, found) in found {
        if let Some(said) = said.filter(|said| *said != found) {
            anyhow::bail!("{} is for {flag} {found}, not {said}", args.name);
        }
    }
    Ok(schedule)
}
