//! Cells as commands, for a machine that is not this one.

use super::cell::Cell;
use super::pool::words;
use std::path::Path;

/// How ranks are started.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Launcher {
    /// As each cell says, on one machine.
    Local,
    /// As processes on the GPUs of one machine.
    Gpus,
    /// By Slurm, with so many GPUs on each machine.
    Srun(usize),
}

/// A shell script that runs every cell, each in its folder below `out`, where `--no-run` finds what they wrote.
pub(crate) fn script(cells: &[Cell], out: &Path, launcher: Launcher) -> String {
    let base = out.join("base.toml");
    let mut script = String::from("#!/bin/sh\n# One line a run; those of one cell in their order.\n");
    for cell in cells.iter().filter(|cell| cell.illegal.is_none()) {
        let folder = out.join(cell.folder());
        for (settings, plan) in cell.runs.iter().zip(&cell.plans) {
            let mut words = words(&base, settings, &folder);
            let ranks = plan.degrees.world_size();
            let mut line = Vec::new();
            match launcher {
                Launcher::Local => {}
                Launcher::Gpus => words.push("--comm.backend=processes".to_owned()),
                Launcher::Srun(gpus) => {
                    words.push("--comm.backend=processes".to_owned());
                    let here = gpus.min(ranks);
                    line.extend(["srun".to_owned(), format!("--ntasks={ranks}"), format!("--ntasks-per-node={here}")]);
                    line.push(format!("--gpus-per-node={here}"));
                    // A rank knows its place by these names, and each machine by the first one's address.
                    let place = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
                                 LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE MASTER_PORT=29500 \
                                 MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1); exec \"$@\"";
                    line.extend(["sh".to_owned(), "-c".to_owned(), quoted(place), "sh".to_owned()]);
                }
            }
            line.push("ferrotitan".to_owned());
            line.extend(words.iter().map(|word| quoted(word)));
            script.push_str(&line.join(" "));
            script.push('\n');
        }
    }
    script
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=,:+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
