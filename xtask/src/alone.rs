//! Each crate by itself: with each of its features, and as the one dependency of somebody's project.

use crate::environment::{Outcome, Workspace, execute, say};
use crate::libtorch::Libtorch;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long an example may run. They take a second or two.
const PATIENCE: Duration = Duration::from_secs(60);

/// A crate that builds only beside the others leans on features that they ask for.
pub fn check_features(workspace: &Workspace, cargo: &dyn Fn(&[&str]) -> Command) -> Outcome {
    let mut failed = Vec::new();
    for member in workspace.members()? {
        let manifest = workspace.read(format!("{member}/Cargo.toml"))?;
        let name = if member == "xtask" { member.clone() } else { format!("ferrotitan-{member}") };
        for set in feature_sets(&features(&manifest, ""), &features(&manifest, "dep:ferrotitan-")) {
            let check = ["check", "--quiet", "--package", &name, "--no-default-features", "--features", &set.join(",")];
            if let Err(message) = execute(&mut cargo(&check)) {
                failed.push(message);
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// The features of a manifest that can be chosen one by one, and bring this. `doc-only` has a phase of its own.
fn features<'a>(manifest: &'a str, brings: &str) -> Vec<&'a str> {
    let section = manifest.split_once("\n[features]\n").map_or("", |(_, rest)| rest);
    let section = section.split("\n[").next().unwrap_or_default();
    let lines = section.lines().filter_map(|line| line.split_once(" = ["));
    let names = lines.filter(|(_, list)| list.contains(brings)).map(|(name, _)| name);
    names.filter(|name| !["default", "doc-only"].contains(name)).collect()
}

/// None, each alone, and all; of those that are crates, also every two, and all but each. What breaks is code that names
/// what a feature brings without asking for it, or two that bring the same: one or two of them show it, present or
/// absent. The whole powerset of the trainer's would be hundreds of checks of several seconds.
fn feature_sets<'a>(features: &[&'a str], crates: &[&'a str]) -> Vec<Vec<&'a str>> {
    let mut sets = vec![vec![], features.to_vec()];
    sets.extend(features.iter().map(|feature| vec![*feature]));
    for (index, feature) in crates.iter().enumerate() {
        sets.extend(crates[index + 1..].iter().map(|other| vec![*feature, *other]));
        sets.push(features.iter().copied().filter(|other| other != feature).collect());
    }
    // Of few features, several of these are the same.
    sets.sort();
    sets.dedup();
    sets
}

/// The example of each library's README, in a project that depends on that library and nothing else of this workspace,
/// and is no member of it: what a user has who wants that one crate.
pub fn run_readmes(workspace: &Workspace, torch: &Libtorch) -> Outcome {
    let folder = workspace.target.join("readmes");
    let _ = fs::remove_dir_all(&folder);
    // Binaries are no dependencies.
    let crates: Vec<_> = workspace.members()?.into_iter().filter(|name| name != "trainer" && name != "xtask").collect();
    let manifest = workspace.read("Cargo.toml")?;
    // Of dependencies, the same versions in the same profile: they are compiled already.
    write(&folder, "Cargo.lock", &workspace.read("Cargo.lock")?)?;
    write(&folder, "Cargo.toml", &scratch_workspace(&manifest, &crates))?;
    for name in &crates {
        let readme = workspace.read(format!("{name}/README.md"))?;
        let example = example(&readme).ok_or_else(|| format!("{name}/README.md has no example with a `fn main`"))?;
        let path = workspace.root.join(name);
        let scratch = format!(
            "[package]\nname = \"readme-{name}\"\nedition = \"2024\"\n\n[dependencies]\n\
             ferrotitan-{name} = {{ path = {path:?} }}\n{}\n",
            others(&manifest, &example).join("\n")
        );
        write(&folder.join(name), "Cargo.toml", &scratch)?;
        write(&folder.join(name), "src/main.rs", &example)?;
    }
    // Together, so that one build of libtorch's bindings serves all: that no crate leans on features that others ask for is
    // what the checks above are for.
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--quiet", "--offline", "--workspace", "--keep-going"]).current_dir(&folder);
    execute(cargo.envs(torch.vars()).env("CARGO_TARGET_DIR", &workspace.target))?;
    let mut failed = Vec::new();
    for name in &crates {
        let mut program = Command::new(workspace.target.join("debug").join(format!("readme-{name}")));
        match run_within(program.current_dir(&folder).env("LD_LIBRARY_PATH", torch.libraries()), PATIENCE) {
            Ok(()) => say(&format!("the example of {name}/README.md runs")),
            Err(message) => failed.push(message),
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// The root of the scratch projects. Our own crates are compiled as in this workspace, where `*` means the others.
fn scratch_workspace(manifest: &str, crates: &[String]) -> String {
    let profiles = manifest.find("[profile.dev]").map_or("", |start| &manifest[start..]);
    let own = profiles.split_once('\n').and_then(|(_, rest)| rest.split("\n[").next()).unwrap_or_default();
    let mut text = format!("[workspace]\nresolver = \"3\"\nmembers = {crates:?}\n\n{profiles}\n");
    for name in crates {
        let _ = write!(text, "\n[profile.dev.package.ferrotitan-{name}]\n{own}\n");
    }
    text
}

/// The lines of a workspace's manifest for other people's crates that an example names by themselves, `tch` for one: its
/// user would depend on them too.
fn others<'a>(manifest: &'a str, example: &str) -> Vec<&'a str> {
    let lines = manifest.split_once("[workspace.dependencies]\n").map_or("", |(_, rest)| rest);
    let lines = lines.split("\n[").next().unwrap_or_default().lines();
    let is_named = |line: &&str| {
        let Some((name, _)) = line.split_once(" = ") else { return false };
        let path = name.replace('-', "_") + "::";
        let starts = |at: usize| !example[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        !name.starts_with("ferrotitan") && example.match_indices(&path).any(|(at, _)| starts(at))
    };
    lines.filter(is_named).collect()
}

/// The first block of Rust with a `fn main`, with the lines that rustdoc hides.
fn example(readme: &str) -> Option<String> {
    let blocks = readme.split("\n```rust\n").skip(1).filter_map(|rest| rest.split("\n```").next());
    let block = blocks.into_iter().find(|block| block.contains("fn main("))?;
    let shown = |line: &str| match line.strip_prefix('#') {
        Some("") => String::new(),
        Some(rest) if rest.starts_with(' ') => rest[1..].to_owned(),
        _ => line.to_owned(),
    };
    Some(block.lines().map(|line| shown(line) + "\n").collect())
}

fn write(folder: &Path, name: &str, text: &str) -> Outcome {
    let path = folder.join(name);
    let parent = path.parent().unwrap_or(folder);
    let written = fs::create_dir_all(parent).and_then(|()| fs::write(&path, text));
    written.map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// Runs a program, which is ended when it takes too long.
fn run_within(program: &mut Command, limit: Duration) -> Outcome {
    let name = Path::new(program.get_program()).display().to_string();
    let mut child = program.spawn().map_err(|e| format!("cannot run `{name}`: {e}"))?;
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("`{name}` failed ({status})")),
            Ok(None) if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(20)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("`{name}` did not end within {} seconds", limit.as_secs()));
            }
            Err(e) => return Err(format!("cannot wait for `{name}`: {e}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_example_is_the_first_with_a_main() {
        let readme = "# x\n\n```rust\nlet a = 1;\n```\n\n\
                      ```rust\nuse x::y;\n#\n# fn main() {\n#[derive(Debug)]\nstruct Z;\n# }\n```\n";
        assert_eq!(example(readme).unwrap(), "use x::y;\n\nfn main() {\n#[derive(Debug)]\nstruct Z;\n}\n");
        assert_eq!(example("```rust\nlet a = 1;\n```\n"), None);
    }

    #[test]
    fn features_are_checked_alone_in_pairs_and_all_but_one() {
        let manifest = "[package]\n\n[features]\ndefault = [\"a\"]\na = []\nb = [\n    \"x/y\",\n]\nc = []\n\
                        doc-only = []\n\n[dependencies]\nd = [1]\n";
        const FIVE: [&str; 5] = ["a", "b", "c", "d", "e"];
        let names = features(manifest, "");
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(feature_sets(&names, &[]), [vec![], vec!["a"], vec!["a", "b", "c"], vec!["b"], vec!["c"]]);
        // All eight of three; of five, all but the ten of three.
        assert_eq!(feature_sets(&names, &names).len(), 8);
        assert_eq!(feature_sets(&FIVE, &FIVE).len(), 32 - 10);
        assert_eq!(feature_sets(&[], &[]), [Vec::<&str>::new()]);
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let start = Instant::now();
        let message = run_within(Command::new("sleep").arg("30"), Duration::from_millis(50)).unwrap_err();
        assert!(message.contains("did not end") && start.elapsed() < Duration::from_secs(20), "{message}");
        assert!(run_within(&mut Command::new("true"), Duration::from_secs(20)).is_ok());
        assert!(run_within(&mut Command::new("false"), Duration::from_secs(20)).is_err());
    }

    #[test]
    fn an_example_brings_what_it_names() {
        let manifest = "[workspace.dependencies]\n# A comment = 1.\nferrotitan-nn = { path = \"nn\" }\n\
                        serde_json = \"1\"\ntch = { version = \"2\" }\ntempfile = \"3\"\n\n[profile.dev]\nlto = 1\n";
        let example = "use ferrotitan_nn::tch::Kind;\nlet x = serde_json::json!({});\nmy_tempfile::new();\n";
        assert_eq!(others(manifest, example), ["serde_json = \"1\""]);
        assert_eq!(others(manifest, "use tch::Tensor;"), ["tch = { version = \"2\" }"]);
    }
}
