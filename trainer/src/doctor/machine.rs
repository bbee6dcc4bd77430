//! The machine: cores, memory, disk, and what a build needs.

use super::Finding;
use nix::sys::statvfs::statvfs;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub(super) fn examine() -> Vec<Finding> {
    let mut findings = vec![threads(), memory()];
    findings.extend(cache_folder().map(|folder| disk(&folder)));
    findings.push(tool("python3", &["python3", "--version"], "apt install python3"));
    findings.push(tool("pip", &["python3", "-m", "pip", "--version"], "apt install python3-pip"));
    findings.push(tool("C++", &["c++", "--version"], "apt install g++"));
    findings
}

fn threads() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let used = usize::try_from(tch::get_num_threads()).unwrap_or(0);
    let text = format!("libtorch uses {used} on {cores} cores");
    if used > cores {
        Finding::note("threads", text, "unset OMP_NUM_THREADS, or set it to the number of cores")
    } else {
        Finding::good("threads", text)
    }
}

fn memory() -> Finding {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some((total, available)) = gib_of(&text, "MemTotal:").zip(gib_of(&text, "MemAvailable:")) else {
        return Finding::good("memory", "unknown: /proc/meminfo does not say");
    };
    let text = format!("{available:.1} of {total:.1} GiB free");
    if available < 1.0 {
        Finding::note("memory", text, "end other programs: the debug model takes about 1 GiB")
    } else {
        Finding::good("memory", text)
    }
}

/// A line of `/proc/meminfo`, which counts in KiB.
fn gib_of(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(rest.split_whitespace().next()?.parse::<f64>().ok()? / 1024.0 / 1024.0)
}

/// Where `cargo xtask` keeps the libtorch that it fetches.
fn cache_folder() -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let cache = cache.or_else(|| Some(env::home_dir()?.join(".cache")))?;
    Some(cache.join("ferrotitan"))
}

fn disk(folder: &Path) -> Finding {
    let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    match statvfs(there) {
        Ok(status) => {
            let gib = status.blocks_available() as f64 * status.fragment_size() as f64 / (1_u64 << 30) as f64;
            let text = format!("{gib:.1} GiB free for {}", folder.display());
            if gib < 1.0 {
                Finding::note("disk", text, "make room for checkpoints and metrics")
            } else {
                Finding::good("disk", text)
            }
        }
        Err(error) => {
            Finding::note("disk", format!("{}: {error}", folder.display()), "set XDG_CACHE_HOME to a folder of yours")
        }
    }
}

/// What only a build needs: where it is missing, a binary that is there already still trains.
fn tool(topic: &'static str, words: &[&str], mend: &str) -> Finding {
    let output = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            Finding::good(topic, text.lines().next().unwrap_or_default())
        }
        _ => Finding::note(topic, format!("`{}` does not run; only builds need it", words.join(" ")), mend),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn meminfo() {
        let text = "MemTotal:       24674304 kB\nMemFree:        1 kB\nMemAvailable:   12582912 kB\n";
        assert_eq!(gib_of(text, "MemAvailable:"), Some(12.0));
        assert_eq!(gib_of(text, "Swap:"), None);
    }

    #[test]
    fn a_missing_tool_is_no_fault() {
        let finding = tool("none", &["ferrotitan-has-no-such-tool"], "install it");
        assert_eq!((finding.state, finding.mend.as_deref()), (State::Note, Some("install it")));
    }

    #[test]
    fn a_folder_that_is_not_there_yet_has_a_disk() {
        assert_eq!(disk(Path::new("/nowhere/at/all")).topic, "disk");
    }
}
