//! `ferrotitan config check` and `ferrotitan config show`.

use super::FAILED;
use super::console::{print, report, say};
use crate::config::check::{Surroundings, World};
use crate::config::{Flag, LoadError, Loaded, show as shown};
use crate::plan::Plan;
use std::path::Path;
use std::process::ExitCode;

/// The config of whoever names none: the debug model on text that is on every machine.
const DEFAULT: &str = include_str!("llama3_debugmodel.toml");

/// The config of a file, or the default one, with the overrides over it.
pub(super) fn load(file: Option<&Path>, flags: &[Flag]) -> Result<Loaded, LoadError> {
    match file {
        Some(file) => Loaded::load(file, flags),
        None => Ok(Loaded::from_text("the default config", DEFAULT, flags)),
    }
}

/// Finds everything that is wrong with a config, wherever it is to run.
pub(super) fn check_file(loaded: &Loaded, around: &Surroundings) -> Result<(Plan, Vec<String>), ()> {
    let mut notes: Vec<String> = loaded.notes().iter().map(ToString::to_string).collect();
    let planned = Plan::new(&loaded.config, around);
    let problems = loaded.with(planned.as_ref().err().cloned().unwrap_or_default());
    match planned {
        Ok((plan, more)) if problems.is_empty() => {
            notes.extend(more.iter().map(ToString::to_string));
            Ok((plan, notes))
        }
        _ => {
            report(loaded, &problems);
            Err(())
        }
    }
}

/// How many ranks the command line asks for.
pub(super) fn world(nproc: Option<usize>, nodes: usize) -> Option<World> {
    nproc.map(|nproc| World {
        size: nproc * nodes,
        says: if nodes == 1 { format!("`--nproc {nproc}`") } else { format!("`--nproc {nproc} --nnodes {nodes}`") },
    })
}

pub(super) fn check(
    file: Option<&Path>,
    flags: &[Flag],
    nproc: Option<usize>,
    nodes: usize,
) -> anyhow::Result<ExitCode> {
    let loaded = load(file, flags)?;
    let around = Surroundings { world: world(nproc, nodes), nodes, ..Surroundings::default() };
    let Ok((plan, notes)) = check_file(&loaded, &around) else { return Ok(ExitCode::from(FAILED)) };
    for note in notes {
        say(&format!("note: {note}"));
    }
    let (degrees, data) = (plan.degrees, &plan.data);
    print(&format!(
        "fine: {} parameters; {} ranks ({degrees}); {} sequences of {} tokens a step; {} steps\n",
        plan.model.parameters(),
        degrees.world_size(),
        data.global_batch,
        data.seq_len,
        plan.steps
    ));
    Ok(ExitCode::SUCCESS)
}

pub(super) fn show(file: Option<&Path>, flags: &[Flag], json: bool) -> anyhow::Result<ExitCode> {
    let loaded = load(file, flags)?;
    if !loaded.problems.is_empty() {
        report(&loaded, &loaded.problems);
        return Ok(ExitCode::from(FAILED));
    }
    if json {
        print(&format!("{}\n", serde_json::to_string_pretty(&loaded.config)?));
    } else {
        print(&shown(&loaded.config));
    }
    Ok(ExitCode::SUCCESS)
}
