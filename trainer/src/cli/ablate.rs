//! `ferrotitan ablate`: runs a matrix of configs, and says what its settings change.

use super::console::{color, print, say};
use super::{FAILED, Usage};
use crate::ablate::commands::{Launcher, script};
use crate::ablate::pool::{self, Options, Outcome, Ran};
use crate::ablate::results::Results;
use crate::ablate::{LANGUAGE, cell::Cell, matrix, page, table};
use crate::config::check::Surroundings;
use crate::config::{Flag, Reporter};
use crate::metrics::{Bar, above_bar};
use anyhow::Context as _;
use clap::Args;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
#[command(after_long_help = LANGUAGE)]
pub(super) struct AblateArgs {
    /// The matrix, TOML; --help says how it is written.
    #[arg(value_name = "MATRIX")]
    matrix: PathBuf,
    /// Folder for all runs and the results. What is finished there is not run again.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Cells at a time. If not given, as many as have no more ranks together than there are cores, and find memory.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Run nothing: write the commands that would run the cells, as a shell script.
    #[arg(long, value_name = "FILE", conflicts_with = "no_run")]
    write_commands: Option<PathBuf>,
    /// In these commands, ranks are processes on GPUs; with --srun, so many on each machine.
    #[arg(long, value_name = "N", requires = "write_commands", value_parser = clap::value_parser!(u16).range(1..))]
    gpus: Option<u16>,
    /// These commands start ranks by Slurm's srun.
    #[arg(long, requires = "gpus")]
    srun: bool,
    /// Run nothing: compare what is there, whoever ran it.
    #[arg(long)]
    no_run: bool,
}

pub(super) fn run(args: &AblateArgs, flags: &[Flag]) -> anyhow::Result<ExitCode> {
    let name = args.matrix.display().to_string();
    let text = fs::read_to_string(&args.matrix).with_context(|| format!("cannot read the matrix {name}"))?;
    let out = std::path::absolute(&args.out).context("cannot tell where --out is")?;
    let commands = args.write_commands.as_deref().map(std::path::absolute).transpose()?;
    let folder = args.matrix.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    // Paths in a matrix and in its configs are from there, for the runs too.
    std::env::set_current_dir(folder).with_context(|| format!("cannot go to {}", folder.display()))?;

    let matrix = match matrix::read(&text, flags) {
        Ok(matrix) => matrix,
        Err(problems) => {
            let text = Reporter::new(color(), 120).render_text(&name, &text, &problems);
            let _ = io::stderr().lock().write_all(text.as_bytes());
            return Ok(ExitCode::from(FAILED));
        }
    };
    let cuda_devices = ferrotitan_ext::cuda::device_count();
    let cells = match matrix.cells(&Surroundings { cuda_devices, ..Surroundings::default() }) {
        Ok(cells) => cells,
        Err(mistakes) => {
            for mistake in &mistakes {
                say(&format!("error: {mistake}"));
            }
            let count = mistakes.len();
            say(&format!("{count} {} in the cells of {name}", if count == 1 { "mistake" } else { "mistakes" }));
            return Ok(ExitCode::from(FAILED));
        }
    };
    if let Some(file) = &commands {
        return write_commands(args, &cells, matrix.base_text(), &out, file);
    }
    let ran = match args.no_run {
        true => found(&cells, &out),
        false => {
            let options = Options {
                program: std::env::current_exe().context("cannot find this program's own file")?,
                out: out.clone(),
                jobs: args.jobs.map(usize::from),
                timeout: matrix.timeout,
            };
            match run_all(&cells, matrix.base_text(), &options)? {
                Outcome::All(ran) => ran,
                Outcome::Interrupted(signal) => {
                    say("error: interrupted; all runs were ended, and the same command goes on from here");
                    // As shells count it.
                    return Ok(ExitCode::from(128 + u8::try_from(signal).unwrap_or(0)));
                }
            }
        }
    };
    let results = Results::new(&name, &cells, &ran, &out);
    let write = |file: &str, text: &str| {
        let path = out.join(file);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write("results.json", &serde_json::to_string_pretty(&results)?)?;
    write("report.html", &page::render(&results))?;
    print(&table::render(&results));
    say(&format!("see {}", out.join("report.html").display()));
    let fails = results.bad().next().is_some();
    Ok(if fails { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

fn run_all(cells: &[Cell], base: &str, options: &Options) -> anyhow::Result<Outcome> {
    let bar = Bar::of("cells", cells.len() as u64, 0);
    let mut ended = 0;
    let outcome = pool::run(cells, base, options, |index, ran| {
        ended += 1;
        let what = match ran {
            Ran::Well { took, earlier: false } => format!("{:.1} s", took.as_secs_f64()),
            Ran::Well { earlier: true, .. } => "finished earlier".to_owned(),
            Ran::Failed { why, .. } => format!("FAILED: {why}"),
            Ran::Left | Ran::Missing => "left out".to_owned(),
        };
        let line = format!("{ended}/{} {}: {what}", cells.len(), cells[index].folder());
        let _ = above_bar(|| writeln!(io::stderr().lock(), "{line}"));
        bar.set(ended);
    });
    drop(bar);
    outcome
}

/// Cells of which something was written, by whomever.
fn found(cells: &[Cell], out: &Path) -> Vec<Ran> {
    let one = |cell: &Cell| match out.join(cell.folder()).join("metrics.jsonl").is_file() {
        _ if cell.illegal.is_some() => Ran::Left,
        true => Ran::Well { took: std::time::Duration::ZERO, earlier: true },
        false => Ran::Missing,
    };
    cells.iter().map(one).collect()
}

fn write_commands(args: &AblateArgs, cells: &[Cell], base: &str, out: &Path, file: &Path) -> anyhow::Result<ExitCode> {
    let launcher = match (args.gpus, args.srun) {
        (None, true) => return Err(Usage("--srun needs --gpus: how many each machine has".into()).into()),
        (None, false) => Launcher::Local,
        (Some(_), false) => Launcher::Gpus,
        (Some(gpus), true) => Launcher::Srun(gpus.into()),
    };
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let base_file = out.join("base.toml");
    fs::write(&base_file, base).with_context(|| format!("cannot write {}", base_file.display()))?;
    fs::write(file, script(cells, out, launcher)).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(ExitCode::SUCCESS)
}
