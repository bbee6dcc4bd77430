//! `cargo xtask train`: from a fresh clone to a training run.

use crate::environment::{Outcome, Workspace, execute, on_path, say};
use crate::libtorch;
use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// Fetches, builds, and becomes the trainer, so that signals and the exit status are its own.
pub fn run(workspace: &Workspace, args: &[OsString]) -> Outcome {
    let program = build(workspace)?;
    let error = Command::new(&program).arg("train").args(args).exec();
    Err(format!("cannot run {}: {error}", program.display()))
}

/// Builds the trainer. Takes well under a second where it is up to date.
pub fn build(workspace: &Workspace) -> Outcome<PathBuf> {
    need_cxx()?;
    let torch = libtorch::locate(workspace)?;
    workspace.fetch_dependencies()?;
    let program = workspace.target.join("release/ferrotitan");
    if !program.is_file() {
        say("building ferrotitan for the first time (5 to 10 minutes on two cores, mostly the bindings to libtorch)");
    }
    let build = ["build", "--release", "--package", "ferrotitan-trainer"];
    execute(workspace.cargo().args(build).envs(torch.vars()))?;
    Ok(program)
}

/// torch-sys and `ext` hold C++.
pub fn need_cxx() -> Outcome {
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    // `CXX` may hold options or a wrapper, such as `ccache g++`: the build will say what is wrong with those.
    let found = compiler.contains([' ', '/']) || on_path(&compiler).is_some();
    found.then_some(()).ok_or_else(|| format!("the C++ compiler `{compiler}` is missing: apt install g++"))
}
