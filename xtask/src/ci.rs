//! `cargo xtask ci`: what a change must pass. The cheap checks come first and all of them run, so that one look shows every
//! fault; all share one dev profile, since each profile compiles libtorch's bindings anew.

use crate::environment::{Outcome, Workspace, execute, say};
use crate::{libtorch, test, tidy, train};
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
        phase("each crate alone", &mut || each_alone(workspace, &cargo));
        phase("without libtorch", &mut || {
            // As docs.rs builds it.
            let check = ["check", "--workspace", "--features", "ferrotitan-trainer/doc-only"];
            execute(workspace.cargo().args(check).env_remove("LIBTORCH").env_remove("LIBTORCH_USE_PYTORCH"))
        });
        phase("packages", &mut || {
            execute(&mut cargo(&["package", "--workspace", "--exclude", "xtask", "--no-verify", "--allow-dirty"]))
        });
        phase("a short training run", &mut || short_run(workspace));
        phase("slow tests", &mut || test::slow(workspace));
        phase("tests", &mut || test::run(workspace, &[]));
    }
    summarize(&reports)
}

/// A crate that builds only beside the others leans on features that they ask for.
fn each_alone(workspace: &Workspace, cargo: &dyn Fn(&[&str]) -> Command) -> Outcome {
    let mut failed = Vec::new();
    for member in workspace.members()? {
        let manifest = workspace.read(format!("{member}/Cargo.toml"))?;
        let name = if member == "xtask" { member } else { format!("ferrotitan-{member}") };
        let features = manifest.split_once("\n[features]\n").map_or("", |(_, rest)| rest);
        let features = features.split("\n[").next().unwrap_or_default();
        let mut variants: Vec<&[&str]> = vec![&[]];
        if features.lines().any(|line| line.starts_with("default = ")) {
            variants.push(&["--no-default-features"]);
        }
        // `doc-only` has a phase of its own.
        if !features.is_empty() && !features.contains("doc-only = ") {
            variants.push(&["--all-features"]);
        }
        for variant in variants {
            if let Err(message) = execute(cargo(&["check", "--quiet", "--package", &name]).args(variant)) {
                failed.push(message);
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
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

fn summarize(reports: &[(String, Duration, Outcome)]) -> Outcome {
    say("=== summary");
    for (name, took, outcome) in reports {
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        say(&format!("{verdict:<6} {:>4}:{:02} {name}", took.as_secs() / 60, took.as_secs() % 60));
    }
    let failed: Vec<_> = reports.iter().filter(|report| report.2.is_err()).map(|report| report.0.as_str()).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}
