//! `ferrotitan checkpoint`: what is in a checkpoint, whether it is sound, in which format, and how two differ.

use super::console::{print, say};
use super::{FAILED, Usage};
use crate::checkpoint_address::open_at;
use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use ferrotitan_checkpoint::interchange::hugging_face::{Config as Shape, Options, write};
use ferrotitan_checkpoint::interchange::{Finding, Opened, convert, diff, read_all};
use ferrotitan_checkpoint::{Dtype, Source as _, Store};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::process::ExitCode;

#[derive(Debug, Subcommand)]
pub(super) enum CheckpointCommand {
    /// Print a table of the tensors in a checkpoint.
    Inspect {
        #[command(flatten)]
        from: Address,
        /// How: as a table, or as data.
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
    /// Read all of a checkpoint, and check its checksums.
    Verify {
        #[command(flatten)]
        from: Address,
    },
    /// Write a checkpoint of any format anew, in another one.
    Convert {
        #[command(flatten)]
        from: Address,
        /// Where to: a folder, or an object store's URL.
        to: String,
        /// The format.
        #[arg(long, value_enum)]
        format: Target,
        /// What a Hugging Face model is written in; each tensor's own dtype if not given.
        #[arg(long, value_name = "DTYPE", value_parser = ["float16", "bfloat16", "float32", "float64"])]
        dtype: Option<String>,
    },
    /// Find the tensors that differ in two checkpoints, and by how much. Exit status 1 if any do.
    Diff {
        #[command(flatten)]
        from: Address,
        /// The other one.
        other: String,
    },
}

#[derive(Debug, Args)]
pub(super) struct Address {
    /// A folder of checkpoints, or of one step (`…/step-10`), a Hugging Face model, or a distributed checkpoint of PyTorch;
    /// a path, or an object store's URL.
    checkpoint: String,
    /// The step; the latest if not given.
    #[arg(long, value_name = "N")]
    step: Option<u64>,
}

impl Address {
    fn open(&self) -> anyhow::Result<Opened> {
        Ok(open_at(&self.checkpoint, self.step)?)
    }
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(super) enum Format {
    Table,
    Json,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(super) enum Target {
    /// Ours, which any mesh can load.
    Native,
    /// A Hugging Face model.
    Hf,
}

pub(super) fn run(command: &CheckpointCommand) -> anyhow::Result<ExitCode> {
    match command {
        CheckpointCommand::Inspect { from, format } => inspect(&from.open()?, *format)?,
        CheckpointCommand::Verify { from } => verify(&from.open()?)?,
        CheckpointCommand::Convert { from, to, format, dtype } => {
            rewrite(&from.open()?, to, *format, dtype.as_deref())?
        }
        CheckpointCommand::Diff { from, other } => return compare(&from.open()?, &open_at(other, None)?),
    }
    Ok(ExitCode::SUCCESS)
}

fn inspect(opened: &Opened, format: Format) -> anyhow::Result<()> {
    let rows = opened.inspect();
    let state = match opened {
        Opened::Native(checkpoint) => Some((checkpoint.step(), checkpoint.state())),
        _ => None,
    };
    if matches!(format, Format::Json) {
        let tensors: Vec<_> = rows
            .iter()
            .map(|row| {
                json!({
                    "name": row.name, "shape": row.info.shape, "dtype": row.info.dtype.to_string(), "bytes": row.bytes,
                    "parts": row.parts, "files": row.files,
                })
            })
            .collect();
        let (step, state) = state.unzip();
        let all = json!({ "format": opened.to_string(), "step": step, "state": state, "tensors": tensors });
        print(&format!("{}\n", serde_json::to_string_pretty(&all)?));
        return Ok(());
    }
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let mut out = format!("{:width$}  {:9}  {:>13}  {:>5}  shape\n", "tensor", "dtype", "bytes", "parts");
    for row in &rows {
        let (dtype, shape) = (row.info.dtype.to_string(), &row.info.shape);
        out += &format!("{:width$}  {dtype:9}  {:13}  {:5}  {shape:?}\n", row.name, row.bytes, row.parts);
    }
    let (bytes, mut files) = (rows.iter().map(|row| row.bytes).sum::<u64>(), Vec::new());
    rows.iter().for_each(|row| files.extend(&row.files));
    files.sort_unstable();
    files.dedup();
    out += &format!("{opened}: {} tensors, {bytes} bytes, {} files\n", rows.len(), files.len());
    if let Some((step, state)) = state {
        let progress = &state["progress"];
        out += &format!("step {step}; progress: {progress}\n");
    }
    print(&out);
    Ok(())
}

fn verify(opened: &Opened) -> anyhow::Result<()> {
    let Opened::Native(checkpoint) = opened else {
        // Without checksums, all that can be said is whether every byte is there.
        read_all(opened, &mut bar("read"))?;
        print(&format!("{opened}: every tensor can be read; the format has no checksums\n"));
        return Ok(());
    };
    let total = checkpoint.files().values().map(|file| file.bytes).sum();
    let (mut progress, mut done) = (bar("checked"), 0);
    checkpoint.verify(|more| {
        done += more;
        progress(done, total);
    })?;
    let files = checkpoint.files().len();
    print(&format!("step {} is sound: {files} files, {total} bytes\n", checkpoint.step()));
    Ok(())
}

fn rewrite(opened: &Opened, to: &str, format: Target, dtype: Option<&str>) -> anyhow::Result<()> {
    let store = Store::open(to)?;
    match format {
        Target::Native if dtype.is_some() => return Err(Usage("--dtype is for --format hf".into()).into()),
        Target::Native => {
            let (step, state) = match opened {
                Opened::Native(checkpoint) => (checkpoint.step(), checkpoint.state().clone()),
                Opened::HuggingFace(model) => (0, json!({ "model_only": true, "model": model.config() })),
                _ => (0, json!({ "model_only": true })),
            };
            convert(opened, &store, step, state, &mut bar("written"))?;
            say(&format!("{to} has step {step}"));
        }
        Target::Hf => {
            if store.exists("config.json")? {
                bail!("{to} has a model already; delete it, or write to another folder");
            }
            let mut options = Options::new(shape_of(opened)?);
            options.dtype = match dtype {
                Some("float16") => Some(Dtype::F16),
                Some("bfloat16") => Some(Dtype::Bf16),
                Some("float64") => Some(Dtype::F64),
                Some(_) => Some(Dtype::F32),
                None => None,
            };
            write(opened, &store, &options, &mut bar("written"))?;
            say(&format!("{to} has the model"));
        }
    }
    Ok(())
}

/// The shape of the model, which tensors alone do not tell: not the heads, and not the rotary wavelengths.
fn shape_of(opened: &Opened) -> anyhow::Result<Shape> {
    match opened {
        Opened::HuggingFace(model) => Ok(model.config().clone()),
        Opened::Native(checkpoint) => serde_json::from_value(checkpoint.state()["model"].clone())
            .context("the checkpoint does not say the shape of its model, and was not written by ferrotitan train"),
        _ => bail!(
            "a {opened} does not say how many heads its model has: load it with checkpoint.initial_load_path, and let the \
             run write the model with checkpoint.last_save_in_hf"
        ),
    }
}

fn compare(first: &Opened, second: &Opened) -> anyhow::Result<ExitCode> {
    let differences = diff(first, second, &mut bar("compared"))?;
    let mut out = String::new();
    for difference in &differences {
        let words = match &difference.finding {
            Finding::OnlyInFirst => "only in the first".to_owned(),
            Finding::OnlyInSecond => "only in the second".to_owned(),
            Finding::Shapes(first, second) => format!("shapes {first:?} and {second:?}"),
            Finding::Values { dtypes: (a, b), elements, absolute, relative } => {
                let dtypes = if a == b { String::new() } else { format!("{a} and {b}; ") };
                format!("{dtypes}{elements} elements differ, by {absolute:e} at most, by {relative:e} of the larger")
            }
            other => format!("{other:?}"),
        };
        out += &format!("{}: {words}\n", difference.tensor);
    }
    let same = differences.is_empty();
    out += &match same {
        true => format!("the same {} tensors in both\n", first.tensors().len()),
        false => format!("{} tensors differ\n", differences.len()),
    };
    print(&out);
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// A progress bar in bytes, on a terminal alone.
fn bar(done: &'static str) -> impl FnMut(u64, u64) {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(4));
    let template = format!("{{bar:30}} {{bytes}}/{{total_bytes}} {done}, {{bytes_per_sec}}, {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    move |position, total| {
        bar.set_length(total);
        bar.set_position(position);
        if position >= total {
            bar.finish_and_clear();
        }
    }
}
