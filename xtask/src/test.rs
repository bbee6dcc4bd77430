//! `cargo xtask test`: every test, with the environment that they need.

use crate::environment::{Outcome, Workspace, execute, on_path, say};
use crate::{libtorch, train};
use std::env;
use std::ffi::OsString;
use std::process::Command;

/// Runs the tests that take minutes: 200 steps of each recipe of Float8.
pub fn slow(workspace: &Workspace) -> Outcome {
    let torch = libtorch::locate(workspace)?;
    let mut cargo = workspace.cargo();
    execute(
        cargo
            .args(["test", "--package", "ferrotitan-float8", "--test", "training", "--", "--ignored"])
            .envs(torch.vars()),
    )
}

/// Runs every test, or those that `args` select. Documentation tests come first, so that the output ends with the summary of
/// all others; a selection leaves them out.
pub fn run(workspace: &Workspace, args: &[OsString]) -> Outcome {
    train::need_cxx()?;
    let torch = libtorch::locate(workspace)?;
    workspace.fetch_dependencies()?;

    let cargo = |words: &[&str]| {
        let mut cargo = workspace.cargo();
        cargo.args(words).envs(torch.vars());
        // Tests run beside each other, and ranks within them: one thread each keeps them from fighting for the cores.
        if env::var_os("OMP_NUM_THREADS").is_none() {
            cargo.env("OMP_NUM_THREADS", "1");
        }
        cargo
    };
    let selected = |mut command: Command| {
        if !args.iter().any(|arg| arg == "-p" || arg == "--package") {
            command.arg("--workspace");
        }
        execute(command.args(args))
    };

    say("building and running the tests (the first build takes 10 to 15 minutes on two cores)");
    if on_path("cargo-nextest").is_none() {
        // One process for all tests of a binary; the documentation tests are among them.
        return selected(cargo(&["test", "--no-fail-fast"]));
    }
    let doctests =
        if args.is_empty() { execute(&mut cargo(&["test", "--doc", "--workspace", "--no-fail-fast"])) } else { Ok(()) };
    selected(cargo(&["nextest", "run", "--no-fail-fast"])).and(doctests)
}
