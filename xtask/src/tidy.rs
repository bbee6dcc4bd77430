//! `cargo xtask tidy`: the rules of the house that no compiler checks. Run as a test too.

use crate::environment::{Outcome, Workspace, say};
use crate::layers;
use std::fs;
use std::path::{Path, PathBuf};

/// A Rust file longer than this holds more than one thing.
const LONGEST: usize = 500;
/// From here on a file is worth a look.
const LONG: usize = 400;

/// Names that say nothing of what a module holds.
const NAMELESS: &[&str] = &["common", "helper", "helpers", "misc", "util", "utils"];

// Put together here, since this file is read too.
const UNFINISHED: &[&str] =
    &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("to", "do!("), concat!("unimpl", "emented!(")];
const HOMES: &[&str] = &[concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/")];
const UNSAFE: &str = concat!("un", "safe");

/// Prints every fault, and fails where there is one.
pub fn run(workspace: &Workspace) -> Outcome {
    let (faults, warnings) = check(workspace)?;
    warnings.iter().for_each(|warning| say(&format!("warning: {warning}")));
    if faults.is_empty() { Ok(()) } else { Err(format!("tidy found {}:\n{}", faults.len(), faults.join("\n"))) }
}

fn check(workspace: &Workspace) -> Outcome<(Vec<String>, Vec<String>)> {
    let mut faults = layers::faults(workspace)?;
    let mut warnings = Vec::new();
    let here = format!("{}/", workspace.root.display());
    for path in files(&workspace.root)? {
        // Images and archives are no text, and hold no fault that is looked for here.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let path = path.strip_prefix(&workspace.root).unwrap_or(&path);
        faults.extend(text_faults(path, &text));
        if text.contains(&here) {
            faults.push(format!("{}: names this clone's folder", path.display()));
        }
        let lines = text.lines().count();
        if is_rust(path) && (LONG + 1..=LONGEST).contains(&lines) {
            warnings.push(format!("{}: {lines} lines", path.display()));
        }
    }
    Ok((faults, warnings))
}

fn is_rust(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}

/// The faults of one file.
fn text_faults(path: &Path, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let mut fault = |what: &str| faults.push(format!("{}:{}: {what}", path.display(), number + 1));
        if UNFINISHED.iter().any(|word| line.contains(word)) {
            fault("is unfinished: finish it, or file an issue");
        }
        if HOMES.iter().any(|home| line.split(home).skip(1).any(|rest| rest.starts_with(|c: char| c.is_alphanumeric())))
        {
            fault("names somebody's home folder");
        }
        if is_rust(path) && !path.starts_with("ext") && is_unsafe(line) {
            fault(&format!("is {UNSAFE}, which stands in ext alone"));
        }
    }
    if !is_rust(path) {
        return faults;
    }
    let lines = text.lines().count();
    if lines > LONGEST {
        faults.push(format!("{}: {lines} lines of at most {LONGEST}: split it by what it holds", path.display()));
    }
    let nameless = path.with_extension("");
    if nameless.components().any(|part| NAMELESS.iter().any(|name| part.as_os_str() == *name)) {
        faults.push(format!("{}: name the module for what it holds", path.display()));
    }
    faults
}

/// Whether a line of Rust uses the keyword, or allows it.
fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let word = |c: char| !(c.is_alphanumeric() || c == '_');
    code.split(word).any(|token| token == UNSAFE) || code.contains(&format!("allow({UNSAFE}_code"))
}

/// Every file under `folder`, without those of Git, of builds and of runs.
fn files(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let failed = |e| format!("cannot read {}: {e}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let ignored = [".git", "target", "outputs"].iter().any(|name| path.ends_with(name));
        if path.is_symlink() || ignored {
            continue;
        }
        if path.is_dir() { found.extend(files(&path)?) } else { found.push(path) }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_tidy() {
        let (faults, _) = check(&Workspace::here()).unwrap();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn each_fault_is_found() {
        let faults = |path: &str, text: &str| text_faults(Path::new(path), text).len();
        assert_eq!(faults("nn/src/a.rs", "//! Tensors.\nfn f() {}\n"), 0);
        assert_eq!(faults("nn/src/a.rs", &format!("// {}: later", UNFINISHED[0])), 1);
        assert_eq!(faults("nn/src/a.rs", &format!("    {})", UNFINISHED[2])), 1);
        assert_eq!(faults("README.md", &format!("see {}me/x", HOMES[0])), 1);
        assert_eq!(faults("README.md", &format!("`{}` alone", HOMES[1])), 0);
        assert_eq!(faults("nn/src/a.rs", &format!("{UNSAFE} {{ f() }}")), 1);
        assert_eq!(faults("nn/src/a.rs", &format!("#![allow({UNSAFE}_code)]")), 1);
        assert_eq!(faults("nn/src/a.rs", &format!("#![forbid({UNSAFE}_code)] // {UNSAFE}")), 0);
        assert_eq!(faults("ext/src/a.rs", &format!("{UNSAFE} {{ f() }}")), 0);
        assert_eq!(faults("nn/src/a.rs", &"\n".repeat(LONGEST)), 0);
        assert_eq!(faults("nn/src/a.rs", &"\n".repeat(LONGEST + 1)), 1);
        assert_eq!(faults("nn/src/utils/a.rs", ""), 1);
        assert_eq!(faults("nn/tests/common.rs", ""), 1);
        assert_eq!(faults("nn/README.md", &"\n".repeat(LONGEST + 1)), 0);
    }
}
