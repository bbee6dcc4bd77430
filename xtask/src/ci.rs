//! `cargo xtask ci`: what a change must pass. The cheap checks come first and all of them run, so that one look shows every
//! fault; all share one dev profile, since each profile compiles libtorch's bindings anew.

use crate::environment::{Outcome, Workspace, execute, say};
use crate::{alone, libtorch, test, tidy, train};
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs every phase and prints a summary.
pub fn run(workspace: &Workspace) -> Outcome {
    let mut reports = Vec::new();
    let mut phase = |name: &str, work: &mut dyn FnMut() -> Outcome| {
        say(&format!("=== {name}"));
        let start = Instant::now();
        let outcome = work();
        if let Err(message) = &outcome {
            say(&format!("{name}: {message}"));
        }
        reports.push((name.to_owned(), start.elapsed(), outcome));
    };

    phase("format", &mut || execute(workspace.cargo().args(["fmt", "--all", "--check"])));
    phase("tidy", &mut || tidy::run(workspace));
    phase("lock file", &mut || execute(workspace.cargo().args(["fetch", "--locked"])));
    let mut torch = None;
    phase("libtorch", &mut || {
        train::need_cxx()?;
        torch = Some(libtorch::locate(workspace)?);
        Ok(())
    });
    if let Some(torch) = torch {
        let cargo = |words: &[&str]| {
            let mut cargo = workspace.cargo();
            cargo.args(words).envs(torch.vars());
            cargo
        };
        phase("clippy", &mut || {
            execute(&mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
        });
        phase("documentation", &mut || {
            execute(cargo(&["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
        });
        phase("each crate alone", &mut || alone::check_features(workspace, &cargo));
        phase("examples of the READMEs", &mut || alone::run_readmes(workspace, &torch));
        phase("without libtorch", &mut || {
            // As docs.rs builds it.
            let check = ["check", "--workspace", "--features", "ferrotitan-trainer/doc-only"];
            execute(workspace.cargo().args(check).env_remove("LIBTORCH").env_remove("LIBTORCH_USE_PYTORCH"))
        });
        phase("packages", &mut || {
            execute(&mut cargo(&["package", "--workspace", "--exclude", "xtask", "--no-verify", "--allow-dirty"]))
        });
        phase("a short training run", &mut || short_run(workspace));
        phase("every subset of six features", &mut || every_subset(workspace));
        phase("a broken reduction is noticed", &mut || {
            let broken = ["--features", "broken-reduction", "--test", "ablate_broken"];
            execute(cargo(&["test", "--package", "ferrotitan-trainer"]).args(broken))
        });
        phase("slow tests", &mut || test::slow(workspace));
        phase("tests", &mut || test::run(workspace, &[]));
    }
    summarize(&reports)
}

/// The released binary trains, and finds libtorch by itself.
fn short_run(workspace: &Workspace) -> Outcome {
    let program = train::build(workspace)?;
    let folder = workspace.target.join("ci-train");
    let _ = std::fs::remove_dir_all(&folder);
    let args = ["train", "--training.steps", "3", "--job.dump_folder"];
    execute(Command::new(program).args(args).arg(&folder).env_remove("LD_LIBRARY_PATH").current_dir(&workspace.root))?;
    let metrics = folder.join("metrics.jsonl");
    let steps = std::fs::read_to_string(&metrics).map_err(|e| format!("{}: {e}", metrics.display()))?;
    if steps.lines().filter(|line| line.contains("\"loss\"")).count() >= 3 {
        return Ok(());
    }
    Err(format!("{} lacks the loss of 3 steps:\n{steps}", metrics.display()))
}

/// 64 meshes and ways of working, of which each trains as one rank does.
fn every_subset(workspace: &Workspace) -> Outcome {
    let program = train::build(workspace)?;
    let folder = workspace.target.join("ci-ablate");
    let _ = std::fs::remove_dir_all(&folder);
    execute(
        Command::new(program).args(["ablate", "ablations/ci.toml", "--out"]).arg(&folder).current_dir(&workspace.root),
    )
}

fn summarize(reports: &[(String, Duration, Outcome)]) -> Outcome {
    say("=== summary");
    for (name, took, outcome) in reports {
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        say(&format!("{verdict:<6} {:>4}:{:02} {name}", took.as_secs() / 60, took.as_secs() % 60));
    }
    let failed: Vec<_> = reports.iter().filter(|report| report.2.is_err()).map(|report| report.0.as_str()).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}
