//! What the commands know of this machine and this workspace, and how they run other programs.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Nothing, or what went wrong and what to do about it.
pub type Outcome<T = ()> = Result<T, String>;

/// The workspace that this program was started from.
#[derive(Debug)]
pub struct Workspace {
    pub root: PathBuf,
    /// Where Cargo puts what it builds.
    pub target: PathBuf,
}

impl Workspace {
    pub fn here() -> Self {
        let manifest_dir = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest_dir).ancestors().nth(1).unwrap_or(Path::new(".")).to_owned();
        // This program lies in TARGET/debug: that holds for every way of setting the target folder.
        let program = env::current_exe().unwrap_or_default();
        let target = program.ancestors().nth(2).map_or_else(|| root.join("target"), Path::to_owned);
        Self { root, target }
    }

    /// The text of a file of this workspace.
    pub fn read(&self, path: impl AsRef<Path>) -> Outcome<String> {
        let path = self.root.join(path);
        std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))
    }

    /// The folders that the root manifest lists as members.
    pub fn members(&self) -> Outcome<Vec<String>> {
        let manifest = self.read("Cargo.toml")?;
        let list = manifest.split_once("members = [").and_then(|(_, rest)| rest.split_once(']'));
        let (list, _) = list.ok_or("Cargo.toml has no `members = […]`")?;
        Ok(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
    }

    /// The Cargo that runs us, in the workspace's root.
    pub fn cargo(&self) -> Command {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.root);
        cargo
    }

    /// Unpacks the sources of all dependencies. They are also the default corpus, so all of them must be there, not only
    /// those that this machine compiles. Silent, and without the network, where nothing is missing.
    pub fn fetch_dependencies(&self) -> Outcome {
        let offline = self.cargo().args(["fetch", "--offline", "--quiet"]).output();
        if offline.is_ok_and(|output| output.status.success()) {
            return Ok(());
        }
        say("fetching the sources of the dependencies (they are the default corpus too; well under a minute)");
        execute(self.cargo().arg("fetch"))
    }
}

/// Where a program lies on `PATH`.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Tells the user what happens next. On standard error, since `cargo xtask env` is read by a shell.
pub fn say(line: &str) {
    eprintln!("xtask: {line}");
}

/// Runs a program to its end, with its output visible.
pub fn execute(command: &mut Command) -> Outcome {
    let status = command.status();
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let words: Vec<_> = std::iter::once(program).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{}` failed ({status})", words.join(" "))),
        Err(error) => Err(format!("cannot run `{}`: {error}", words.join(" "))),
    }
}

/// Runs a program and returns what it prints, or `None` where it fails.
pub fn output_of(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
