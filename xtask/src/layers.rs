//! Which crate may depend on which: the table of ARCHITECTURE.md, for `cargo xtask tidy`.

use crate::environment::{Outcome, Workspace};

/// A crate's folder, and the crates of this workspace that it may name under `[dependencies]`. Those that are still to be
/// written stand here too.
const TABLE: &[(&str, &[&str])] = &[
    ("mesh", &[]),
    ("ext", &[]),
    ("comm", &["mesh", "ext"]),
    ("nn", &["mesh", "ext"]),
    ("schedule", &[]),
    ("fsdp", &["comm", "nn", "mesh", "ext"]),
    ("tp", &["comm", "nn", "mesh", "ext"]),
    ("cp", &["comm", "nn", "mesh", "ext"]),
    ("float8", &["comm", "nn", "mesh", "ext"]),
    ("pp", &["comm", "nn", "schedule", "mesh", "ext"]),
    ("checkpoint", &["mesh", "comm", "ext"]),
    ("data", &[]),
    ("optim", &["comm", "nn", "mesh", "ext"]),
    ("telemetry", &[]),
    ("plan", &["mesh", "schedule"]),
    ("xtask", &[]),
];

/// May depend on every crate.
const TOP: &str = "trainer";

/// Build and test in seconds, on a machine without libtorch.
const PURE: &[&str] = &["mesh", "schedule", "data", "telemetry", "plan", "xtask"];

/// What every crate must keep to, as one line a fault.
pub fn faults(workspace: &Workspace) -> Outcome<Vec<String>> {
    let mut faults = Vec::new();
    let readme = workspace.read("README.md").unwrap_or_default();
    let architecture = workspace.read("ARCHITECTURE.md").unwrap_or_default();
    for member in workspace.members()? {
        let manifest = workspace.read(format!("{member}/Cargo.toml"))?;
        faults.extend(dependency_faults(&member, &manifest));
        if !manifest.lines().any(|line| line.starts_with("description = ")) {
            faults.push(format!("{member}/Cargo.toml: has no description"));
        }
        if member != "xtask" && workspace.read(format!("{member}/README.md")).is_err() {
            faults.push(format!("{member}: has no README.md"));
        }
        for (page, text) in [("README.md", &readme), ("ARCHITECTURE.md", &architecture)] {
            if !text.lines().any(|line| line.starts_with('|') && line.contains(&format!("`{member}/`"))) {
                faults.push(format!("{page}: its table of crates lacks `{member}/`"));
            }
        }
    }
    let root = workspace.read("Cargo.toml")?;
    let names = dependencies(&root, "workspace.dependencies");
    if let Some(pair) = names.windows(2).find(|pair| pair[0] > pair[1]) {
        faults.push(format!("Cargo.toml: `{}` stands before `{}`: keep the order of the alphabet", pair[0], pair[1]));
    }
    Ok(faults)
}

/// Holds one manifest to the table.
fn dependency_faults(member: &str, manifest: &str) -> Vec<String> {
    let allowed = TABLE.iter().find(|(name, _)| *name == member).map(|(_, allowed)| *allowed);
    if allowed.is_none() && member != TOP {
        return vec![format!(
            "{member}: is not in the table of xtask/src/layers.rs: add it there and to ARCHITECTURE.md"
        )];
    }
    let mut faults = Vec::new();
    for name in ["dependencies", "build-dependencies"].iter().flat_map(|table| dependencies(manifest, table)) {
        let sibling = name.strip_prefix("ferrotitan-");
        if sibling.is_some_and(|sibling| allowed.is_some_and(|allowed| !allowed.contains(&sibling))) {
            faults.push(format!("{member}/Cargo.toml: {member} may not depend on {name} (ARCHITECTURE.md)"));
        }
        if PURE.contains(&member) && ["tch", "torch-sys"].contains(&name) {
            faults.push(format!("{member}/Cargo.toml: {member} must not link libtorch"));
        }
        if member == "xtask" {
            faults.push(format!("{member}/Cargo.toml: {member} has no dependencies, but names {name}"));
        }
    }
    faults
}

/// The names under `[TABLE]`, `[TABLE.name]` and `[target.….TABLE]` of a manifest, in its order.
fn dependencies<'a>(manifest: &'a str, table: &str) -> Vec<&'a str> {
    let mut names = Vec::new();
    let mut inside = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[').and_then(|line| line.split(']').next()) {
            let of_target = header.strip_prefix("target.").and_then(|rest| rest.rsplit_once('.')).map(|(_, name)| name);
            inside = header == table || of_target == Some(table);
            names.extend(header.strip_prefix(table).and_then(|rest| rest.strip_prefix('.')));
        } else if inside && line.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            names.extend(line.split(['.', '=', ' ']).next());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_run_down_the_table_only() {
        let manifest = "[dependencies]\nferrotitan-mesh.workspace = true\ntch = \"0.26\"\n[dev-dependencies]\nferrotitan-nn = \"1\"";
        assert_eq!(dependency_faults("comm", manifest), [""; 0]);
        assert_eq!(dependency_faults("trainer", "[dependencies]\nferrotitan-comm = \"0.1\""), [""; 0]);
        assert!(dependency_faults("comm", "[dependencies.ferrotitan-nn]\npath = \"nn\"")[0].contains("ferrotitan-nn"));
        assert_eq!(dependency_faults("nn", "[build-dependencies]\nferrotitan-comm = { path = \"comm\" }").len(), 1);
        assert_eq!(dependency_faults("mesh", manifest).len(), 2);
        assert_eq!(dependency_faults("xtask", "[dependencies]\nanyhow = \"1\"").len(), 1);
        assert!(dependency_faults("misfit", "")[0].contains("not in the table"));
    }

    #[test]
    fn a_crate_never_stands_above_what_it_may_use() {
        for (member, allowed) in TABLE {
            for lower in *allowed {
                let (_, below) = TABLE.iter().find(|(name, _)| name == lower).unwrap();
                assert!(!below.contains(member), "{member} and {lower} may use each other");
                assert!(
                    below.iter().all(|name| allowed.contains(name)),
                    "{member} may use {lower}, but not what it uses"
                );
            }
        }
    }

    #[test]
    fn manifests_are_read_in_every_form() {
        let manifest = "[package]\nname = \"a\"\n[dependencies]\n# why\nb.workspace = true\nc = { version = \"1\", features = [\n  \
                        \"x\",\n] }\n[dependencies.d]\nversion = \"1\"\n[target.'cfg(unix)'.dependencies]\ne = \"1\"\n[features]\nf = []\n";
        assert_eq!(dependencies(manifest, "dependencies"), ["b", "c", "d", "e"]);
    }
}
