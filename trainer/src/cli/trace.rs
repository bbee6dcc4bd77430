//! `ferrotitan trace`: what traces of a run say.

use super::console::print;
use clap::Subcommand;
use ferrotitan_telemetry::trace::{merge, summary};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Subcommand)]
pub(super) enum TraceCommand {
    /// Say where the steps' time went, by rank, and which rank the others wait for.
    Summary {
        /// A trace of all ranks, or the traces of each.
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
    /// Put the traces of several ranks into one file, for Perfetto or Chrome.
    Merge {
        /// The traces.
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// Where the whole is written.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
}

pub(super) fn run(command: &TraceCommand) -> anyhow::Result<ExitCode> {
    match command {
        TraceCommand::Summary { files } => print(&summary(&merge(files)?).to_string()),
        TraceCommand::Merge { files, out } => merge(files)?.write(out)?,
    }
    Ok(ExitCode::SUCCESS)
}
