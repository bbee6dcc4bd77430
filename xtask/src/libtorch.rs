//! Which libtorch is used: the one that `LIBTORCH` or `LIBTORCH_USE_PYTORCH` names, else one that is fetched from PyPI into
//! the user's cache folder, once for all clones.

use crate::environment::{Outcome, Workspace, execute, on_path, output_of, say};
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Written last into a fetched virtual environment: one without it was left half-made. Holds the path of the `torch` package
/// within the environment, so that a second run need not search.
const MARKER: &str = "ferrotitan-complete";

/// A libtorch on this machine.
#[derive(Debug)]
pub struct Libtorch {
    /// Holds `include/` and `lib/`.
    folder: PathBuf,
    /// A Python that can `import torch` of the same version: tests compare with it.
    python: Option<PathBuf>,
    /// `LIBTORCH_USE_PYTORCH` names this libtorch, so `LIBTORCH` must not.
    by_python: bool,
    /// Major, minor and patch number.
    version: [u32; 3],
}

impl Libtorch {
    /// The environment in which Cargo builds and tests with this libtorch.
    pub fn vars(&self) -> Vec<(&'static str, OsString)> {
        let mut vars = Vec::new();
        if !self.by_python {
            vars.push(("LIBTORCH", self.folder.clone().into()));
        }
        if let (Some(python), None) = (&self.python, env::var_os("FERROTITAN_PYTHON")) {
            vars.push(("FERROTITAN_PYTHON", python.into()));
        }
        // torch-sys compares the patch number too. Minor versions alone change the interface.
        if self.version[2] != 0 {
            vars.push(("LIBTORCH_BYPASS_VERSION_CHECK", "1".into()));
        }
        vars
    }

    /// Where its shared libraries are.
    pub fn libraries(&self) -> PathBuf {
        self.folder.join("lib")
    }
}

/// Finds libtorch, and fetches it where there is none. Costs a few file look-ups once it is there.
pub fn locate(workspace: &Workspace) -> Outcome<Libtorch> {
    let tch = locked_tch(&workspace.read("Cargo.lock")?)?;
    let wanted = torch_for(&tch)?;
    if env::var_os("LIBTORCH_USE_PYTORCH").is_some() {
        return of_python(&tch, wanted);
    }
    if let Some(folder) = env::var_os("LIBTORCH").filter(|folder| !folder.is_empty()) {
        return of_folder(Path::new(&folder), &tch, wanted);
    }
    fetched(wanted)
}

/// The version of `tch` in the lock file.
fn locked_tch(lock: &str) -> Outcome<String> {
    let mut lines = lock.lines().skip_while(|line| *line != "name = \"tch\"").skip(1);
    let version = lines.next().and_then(|line| line.strip_prefix("version = \""));
    Ok(version.ok_or("Cargo.lock names no version of tch")?.trim_end_matches('"').to_owned())
}

/// One version of `tch` is one version of torch.
fn torch_for(tch: &str) -> Outcome<[u32; 2]> {
    match tch.split('.').nth(1) {
        Some("24") => Ok([2, 11]),
        Some("25") => Ok([2, 12]),
        Some("26") => Ok([2, 13]),
        _ => Err(format!("xtask knows no torch for tch {tch}: add it to `torch_for` in xtask/src/libtorch.rs")),
    }
}

fn of_folder(folder: &Path, tch: &str, wanted: [u32; 2]) -> Outcome<Libtorch> {
    // Cargo runs build scripts elsewhere: a relative path would be wrong there.
    let folder = std::path::absolute(folder).map_err(|e| format!("LIBTORCH={}: {e}", folder.display()))?;
    let version = checked_version(&folder, "LIBTORCH", tch, wanted)?;
    // …/ENVIRONMENT/lib/python3.X/site-packages/torch
    let python = folder.ancestors().nth(4).map(|environment| environment.join("bin/python"));
    Ok(Libtorch { folder, python: python.filter(|file| file.is_file()), by_python: false, version })
}

fn of_python(tch: &str, wanted: [u32; 2]) -> Outcome<Libtorch> {
    // The same choice as torch-sys makes.
    let name = if env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
    let script = "import importlib.util as u, sys; print(sys.executable); \
                  print(u.find_spec('torch').submodule_search_locations[0])";
    let answer = output_of(Command::new(name).args(["-c", script]));
    let (python, folder) = answer.as_deref().and_then(|text| text.split_once('\n')).ok_or_else(|| {
        format!("LIBTORCH_USE_PYTORCH is set, but `{name}` finds no torch: unset it, or install torch there")
    })?;
    let folder = PathBuf::from(folder);
    let version = checked_version(&folder, "LIBTORCH_USE_PYTORCH", tch, wanted)?;
    Ok(Libtorch { folder, python: Some(python.into()), by_python: true, version })
}

fn checked_version(folder: &Path, named_by: &str, tch: &str, wanted: [u32; 2]) -> Outcome<[u32; 3]> {
    let version = version_of(folder).ok_or_else(|| {
        format!(
            "{named_by} names {}, which is no libtorch: it should hold lib/, include/, and build-version (libtorch) or \
             version.py (the torch package of Python)",
            folder.display()
        )
    })?;
    if version[..2] == wanted {
        return Ok(version);
    }
    let [major, minor, _] = version;
    let precise = (24..=26).map(|minor| format!("0.{minor}.0")).find(|tch| torch_for(tch) == Ok([major, minor]));
    let instead =
        precise.map_or(String::new(), |tch| format!(", or build for this one: cargo update tch --precise {tch}"));
    Err(format!(
        "{named_by} names torch {major}.{minor} in {}, but Cargo.lock has tch {tch}, which needs torch {}.{}. Name another, \
         or unset {named_by} to have the right one fetched{instead}",
        folder.display(),
        wanted[0],
        wanted[1],
    ))
}

/// `build-version` holds `2.13.0+cpu`; `version.py` holds `__version__ = '2.13.0+cu130'`.
fn version_of(folder: &Path) -> Option<[u32; 3]> {
    let text = fs::read_to_string(folder.join("build-version"))
        .or_else(|_| fs::read_to_string(folder.join("version.py")))
        .ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("__version__ = ")).unwrap_or(&text);
    let mut numbers = line.trim_matches(['\'', '"', '\n', ' ']).split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some([numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?])
}

fn fetched([major, minor]: [u32; 2]) -> Outcome<Libtorch> {
    let torch = format!("torch=={major}.{minor}.0");
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let cache = cache.or_else(|| env::home_dir().map(|home| home.join(".cache")));
    let cache = cache.ok_or("neither XDG_CACHE_HOME nor HOME is set: set LIBTORCH")?.join("ferrotitan");
    let name = torch.replace("==", "-");
    let venv = cache.join(&name);
    let found = |folder| Libtorch {
        folder,
        python: Some(venv.join("bin/python")),
        by_python: false,
        version: [major, minor, 0],
    };
    if let Some(folder) = complete(&venv) {
        return Ok(found(folder));
    }

    // The kernel drops a lock when its last holder ends, however it ends.
    let failed = |e: io::Error| format!("cannot write {}: {e}", cache.display());
    fs::create_dir_all(&cache).map_err(failed)?;
    let lock = File::options().read(true).append(true).create(true).open(cache.join(name + ".lock")).map_err(failed)?;
    if lock.try_lock().is_err() {
        say(&format!("waiting for another process that is installing into {}", venv.display()));
        lock.lock().map_err(failed)?;
    }
    if let Some(folder) = complete(&venv) {
        return Ok(found(folder));
    }
    install(&venv, &torch, &lock)?;
    complete(&venv).map(found).ok_or_else(|| format!("{} cannot be read back", venv.display()))
}

/// The `torch` package of a virtual environment that was finished.
fn complete(venv: &Path) -> Option<PathBuf> {
    let package = venv.join(fs::read_to_string(venv.join(MARKER)).ok()?.trim());
    package.join("lib").is_dir().then_some(package)
}

/// The programs that write into `venv` get `lock` as their standard input: it stays taken until they too have ended, should
/// this one be killed.
fn install(venv: &Path, torch: &str, lock: &File) -> Outcome {
    let python =
        on_path("python3").ok_or("python3 is missing, and is needed to fetch libtorch: apt install python3-pip")?;
    let says = |script: &str| output_of(Command::new(&python).args(["-c", script]));
    if says("import sys; print(sys.version_info >= (3, 10))").as_deref() != Some("True") {
        return Err(format!("{torch} needs Python 3.10 or newer, which {} is not", python.display()));
    }
    let failed = |e: io::Error| format!("cannot write {}: {e}", venv.display());
    if venv.exists() {
        say(&format!("removing {}, which was left unfinished", venv.display()));
        fs::remove_dir_all(venv).map_err(failed)?;
    }
    say(&format!(
        "fetching {torch} from PyPI into {} (once; 5 GB on disk; one to several minutes, by the network)",
        venv.display()
    ));
    let held = || lock.try_clone().map_err(failed);
    let mut create = Command::new(&python);
    execute(create.args(["-m", "venv", "--without-pip"]).arg(venv).stdin(held()?).stdout(io::stderr()))
        .map_err(|e| format!("{e}: on Debian, apt install python3-venv"))?;

    // Large wheels are unpacked beside their destination, since /tmp is often a small memory disk.
    let scratch = venv.join("tmp");
    fs::create_dir(&scratch).map_err(failed)?;
    let mut pip = pip_for(&python, venv, held()?)?;
    // A cache of wheels would double the disk space, and old versions of pip hold the whole file in memory to fill it.
    pip.args(["install", "--no-cache-dir", "--no-compile", "--no-user", "--disable-pip-version-check", torch, "numpy"]);
    // What tests read our files with; they say so and pass over it where it is missing.
    pip.args(["transformers==5.24.0", "tensorboard==2.21.0"]);
    // Headers of CUDA that torch does not ask for, and that NCCL's side of `ext` is compiled with.
    if cfg!(target_os = "linux") && torch.starts_with("torch==2.13.") {
        pip.args(["nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*"]);
    }
    execute(pip.env("TMPDIR", &scratch).stdin(held()?).stdout(io::stderr())).map_err(|_| {
        format!(
            "pip could not install {torch}; its own message is above. It needs the network, 8 GB of free disk space, and a \
             Python for which PyPI has this torch (3.10 to 3.14)"
        )
    })?;
    fs::remove_dir_all(&scratch).map_err(failed)?;

    let package = fs::read_dir(venv.join("lib"))
        .map_err(failed)?
        .flatten()
        .map(|entry| Path::new("lib").join(entry.file_name()).join("site-packages/torch"))
        .find(|package| venv.join(package).join("lib").is_dir());
    let package = package.ok_or_else(|| format!("pip put no torch into {}", venv.display()))?;
    fs::write(venv.join(MARKER), package.to_string_lossy().as_bytes()).map_err(failed)
}

/// A `pip` that installs into `venv`: the environment's own where Python can make one, else the machine's, which Debian
/// packages apart from `ensurepip`.
fn pip_for(python: &Path, venv: &Path, held: File) -> Outcome<Command> {
    let inner = venv.join("bin/python");
    let quiet = |command: &mut Command| {
        let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if quiet(Command::new(&inner).args(["-m", "ensurepip"]).stdin(held)) {
        let mut pip = Command::new(&inner);
        pip.args(["-m", "pip"]);
        return Ok(pip);
    }
    let mut pip = Command::new(python);
    pip.args(["-m", "pip"]);
    if !quiet(Command::new(python).args(["-m", "pip", "--version"])) {
        return Err("pip is missing, and is needed to fetch libtorch: apt install python3-pip".into());
    }
    // Since pip 22.3. An environment is never "externally managed", whatever Debian says of the machine's Python.
    pip.arg("--python").arg(&inner);
    Ok(pip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_file_decides_the_torch() {
        let lock =
            "[[package]]\nname = \"tch\"\nversion = \"0.24.0\"\n\n[[package]]\nname = \"toml\"\nversion = \"1.2.0\"\n";
        let tch = locked_tch(lock).unwrap();
        assert_eq!(tch, "0.24.0");
        assert_eq!(torch_for(&tch), Ok([2, 11]));
        assert!(torch_for("0.99.0").unwrap_err().contains("0.99.0"));
        assert!(locked_tch("name = \"toml\"\nversion = \"1.2.0\"\n").is_err());
        // This workspace's own.
        torch_for(&locked_tch(&Workspace::here().read("Cargo.lock").unwrap()).unwrap()).unwrap();
    }

    #[test]
    fn versions_are_read_from_both_kinds_of_libtorch() {
        let folder = env::temp_dir().join(format!("xtask-version-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(version_of(&folder), None);
        fs::write(folder.join("version.py"), "from typing import Optional\n__version__ = '2.13.1+cu130'\n").unwrap();
        assert_eq!(version_of(&folder), Some([2, 13, 1]));
        let message = checked_version(&folder, "LIBTORCH", "0.24.0", [2, 11]).unwrap_err();
        assert!(message.contains("needs torch 2.11") && message.contains("--precise 0.26.0"), "{message}");
        fs::write(folder.join("build-version"), "2.11.0+cpu\n").unwrap();
        assert_eq!(version_of(&folder), Some([2, 11, 0]));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn an_unfinished_environment_does_not_count() {
        let venv = env::temp_dir().join(format!("xtask-venv-{}", std::process::id()));
        let package = Path::new("lib/python3.11/site-packages/torch");
        fs::create_dir_all(venv.join(package).join("lib")).unwrap();
        assert_eq!(complete(&venv), None);
        fs::write(venv.join(MARKER), package.to_str().unwrap()).unwrap();
        assert_eq!(complete(&venv), Some(venv.join(package)));
        fs::remove_dir_all(venv.join("lib")).unwrap();
        assert_eq!(complete(&venv), None);
        fs::remove_dir_all(&venv).unwrap();
    }
}
