//! The command line.

mod ablate;
#[cfg(feature = "checkpoint")]
mod checkpoint;
mod config;
mod console;
#[cfg(feature = "telemetry")]
mod report;
mod schedule;
#[cfg(feature = "telemetry")]
mod trace;
mod train;

use crate::config::{Flag, split};
use crate::{doctor, launch};
use clap::{Args, Parser, Subcommand};
use console::say;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// What went wrong in the work itself.
const FAILED: u8 = 1;
/// What went wrong on the command line.
const USAGE: u8 = 2;

/// A command line that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

/// Trains large language models on any mesh.
#[derive(Debug, Parser)]
#[command(name = "ferrotitan", version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train, as a config says.
    ///
    /// Every key of the config can be set over the file: --training.steps 100, --model.converters=float8,
    /// --checkpoint.enable, --checkpoint.no_enable. `ferrotitan config show` lists them all.
    Train(TrainArgs),
    /// Run a matrix of configs, compare each cell with its reference, and say what each setting costs and gains.
    Ablate(ablate::AblateArgs),
    /// Look at a config.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Look at checkpoints, check them, convert them, compare them.
    #[cfg(feature = "checkpoint")]
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Draw a pipeline schedule, verified, with its bubble and the activations that it holds.
    Schedule(schedule::ScheduleArgs),
    /// Say why a run ended badly, by what its ranks left behind.
    #[cfg(feature = "telemetry")]
    Report(report::ReportArgs),
    /// Look at traces of a run.
    #[cfg(feature = "telemetry")]
    #[command(subcommand)]
    Trace(trace::TraceCommand),
    /// Say what this build runs on, and what is missing.
    Doctor,
}

#[derive(Debug, Args)]
struct FileArgs {
    /// The config, TOML with TorchTitan's names; the debug model on Rust sources if there is none.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The same. `--job.config_file FILE` is the same too.
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    config: Option<PathBuf>,
}

impl FileArgs {
    /// The one file that is named, `named` being TorchTitan's way to do so.
    fn only(self, named: &[Flag]) -> Result<Option<PathBuf>, Usage> {
        let named = named.iter().map(|flag| PathBuf::from(flag.value.clone().unwrap_or_default()));
        let mut files: Vec<PathBuf> = self.file.into_iter().chain(self.config).chain(named).collect();
        match files.len() {
            0 | 1 => Ok(files.pop()),
            _ => Err(Usage("more than one config file is given".into())),
        }
    }
}

#[derive(Debug, Args)]
struct RankArgs {
    /// Ranks on this machine. As many as the config's degrees multiply to if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    nproc: Option<u16>,
    /// Machines.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    nnodes: u16,
}

#[derive(Debug, Args)]
struct TrainArgs {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    ranks: RankArgs,
    /// Which of the machines this is, from 0 on.
    #[arg(long, value_name = "R", default_value_t = 0)]
    node_rank: u16,
    /// Address of machine 0; needed with several machines.
    #[arg(long, value_name = "A")]
    master_addr: Option<String>,
    /// A free port of machine 0; needed with several machines, chosen on one.
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// Show the run on the terminal while it runs: loss, throughput, memory, and what each rank does. Ranks are threads.
    #[arg(long)]
    tui: bool,
}

impl TrainArgs {
    /// The machines, if the words about them make sense together.
    fn machines(&self) -> Result<launch::Machines, Usage> {
        let count = self.ranks.nnodes;
        if self.node_rank >= count {
            let least = u32::from(self.node_rank) + 1;
            return Err(Usage(format!("--node-rank {} needs --nnodes {least} or more", self.node_rank)));
        }
        if count > 1 && (self.master_addr.is_none() || self.master_port.is_none()) {
            return Err(Usage(format!("--nnodes {count} needs --master-addr and --master-port: where rank 0 listens")));
        }
        let alone = launch::Machines::default();
        Ok(launch::Machines {
            count: count.into(),
            index: self.node_rank.into(),
            master_addr: self.master_addr.clone().unwrap_or(alone.master_addr),
            master_port: self.master_port,
        })
    }
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Find everything that is wrong with a config.
    Check {
        #[command(flatten)]
        file: FileArgs,
        #[command(flatten)]
        ranks: RankArgs,
    },
    /// Print a complete config, every key with its meaning.
    Show {
        #[command(flatten)]
        file: FileArgs,
        /// How: as a config, or as data.
        #[arg(long, value_enum, default_value_t = Format::Toml)]
        format: Format,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Format {
    /// A config, with comments.
    Toml,
    /// One JSON object.
    Json,
}

/// Runs a command line, and says how it ended: 0 well, 1 not, 2 for a command line that makes no sense.
pub fn main(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    launch::follow_parent();
    let words: Vec<OsString> = words.into_iter().collect();
    let Ok(text) = words.iter().map(|word| word.clone().into_string()).collect::<Result<Vec<String>, _>>() else {
        say("error: the command line is not UTF-8");
        return ExitCode::from(USAGE);
    };
    let (rest, flags) = split(text);
    let cli = match Cli::try_parse_from(rest) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no mistakes, and clap knows where each goes.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };

    let own_words = words.get(1..).unwrap_or_default();
    match dispatch(cli.command, flags, own_words) {
        Ok(code) => code,
        Err(error) => {
            say(&format!("error: {}", in_words(&error)));
            ExitCode::from(if error.is::<Usage>() { USAGE } else { FAILED })
        }
    }
}

fn dispatch(command: Command, flags: Vec<Flag>, words: &[OsString]) -> anyhow::Result<ExitCode> {
    // TorchTitan's name for the file.
    let (named, flags): (Vec<Flag>, Vec<Flag>) = flags.into_iter().partition(|flag| flag.path == "job.config_file");
    match command {
        Command::Train(args) => {
            let machines = args.machines()?;
            let file = args.file.only(&named)?;
            train::run(file.as_deref(), &flags, args.ranks.nproc.map(usize::from), machines, args.tui, words)
        }
        Command::Ablate(_) if !named.is_empty() => Err(Usage("the config of a matrix is its `base`".into()).into()),
        Command::Ablate(args) => ablate::run(&args, &flags),
        Command::Config(ConfigCommand::Check { file, ranks }) => {
            let nproc = ranks.nproc.map(usize::from);
            config::check(file.only(&named)?.as_deref(), &flags, nproc, ranks.nnodes.into())
        }
        Command::Config(ConfigCommand::Show { file, format }) => {
            config::show(file.only(&named)?.as_deref(), &flags, matches!(format, Format::Json))
        }
        #[cfg(feature = "checkpoint")]
        Command::Checkpoint(_) if !flags.is_empty() => Err(Usage("checkpoint takes no config".into()).into()),
        #[cfg(feature = "checkpoint")]
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Schedule(_) if !flags.is_empty() => Err(Usage("schedule takes no config".into()).into()),
        Command::Schedule(args) => schedule::run(&args),
        #[cfg(feature = "telemetry")]
        Command::Report(_) | Command::Trace(_) if !flags.is_empty() => {
            Err(Usage("neither report nor trace takes a config".into()).into())
        }
        #[cfg(feature = "telemetry")]
        Command::Report(args) => report::run(&args),
        #[cfg(feature = "telemetry")]
        Command::Trace(command) => trace::run(&command),
        Command::Doctor if !flags.is_empty() => Err(Usage("doctor takes no config".into()).into()),
        Command::Doctor => Ok(doctor::run()),
    }
}

/// An error with its causes, each said once, without libtorch's frames.
fn in_words(error: &anyhow::Error) -> String {
    let mut said = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        let cause = cause.split("\nException raised from").next().unwrap_or_default().trim_end();
        if !said.contains(cause) {
            said.push_str(if said.is_empty() { "" } else { ": " });
            said.push_str(cause);
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let inner = std::io::Error::other("the disk is full");
        let told = anyhow::Error::new(inner).context("rank 0: the disk is full").context("training ended");
        assert_eq!(in_words(&told), "training ended: rank 0: the disk is full");
        let torch =
            anyhow::anyhow!("no memory\nException raised from alloc at x.cpp:1 (most recent call first):\nframe #0");
        assert_eq!(in_words(&torch), "no memory");
    }
}
