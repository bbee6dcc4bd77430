//! `ferrotitan report`: why a run ended, by what its ranks left behind.

use super::console::print;
use crate::train::watch;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(super) struct ReportArgs {
    /// The folder of the run's records, or the run's own, which has it as `comm_traces`.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

pub(super) fn run(args: &ReportArgs) -> anyhow::Result<ExitCode> {
    let inner = args.folder.join("comm_traces");
    let folder = if inner.is_dir() { &inner } else { &args.folder };
    print(&watch::read(folder)?.to_string());
    Ok(ExitCode::SUCCESS)
}
