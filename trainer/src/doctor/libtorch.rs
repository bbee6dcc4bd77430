//! libtorch: which one, from where, and what it can do.

use super::Finding;
use ferrotitan_ext::{cuda, library, process_group};
use std::fs;
use std::path::{Path, PathBuf};

pub(super) fn examine() -> Vec<Finding> {
    let torch = library::torch_version();
    let mut findings = vec![fits(&torch, env!("FERROTITAN_TCH_VERSION")), abi(library::cxx11_abi()), works()];
    findings.extend(libraries(&torch, library::lib_dir(), &library::loaded_libraries()));
    findings.push(cuda_state(library::cuda_version(), has_driver(), cuda::device_count()));
    findings.extend(devices());
    findings.push(if library::gloo_compiled() {
        Finding::good("gloo", "ranks can be processes on CPUs")
    } else {
        Finding::note("gloo", "not compiled in: ranks can only be threads", "build without the feature doc-only")
    });
    findings.push(nccl(process_group::nccl_available(), cuda::device_count()));
    findings
}

/// One version of `tch` is made for one version of torch.
fn fits(torch: &str, tch: &str) -> Finding {
    let minor = |version: &str| version.split('.').nth(1)?.parse::<u32>().ok();
    let wanted = minor(tch).map(|minor| minor.saturating_sub(13));
    match (wanted, minor(torch)) {
        _ if tch.is_empty() => Finding::good("torch", torch),
        (Some(wanted), Some(found)) if wanted == found => {
            Finding::good("torch", format!("{torch}, as tch {tch} needs"))
        }
        (Some(wanted), _) => Finding::blocks(
            "torch",
            format!("{torch}, but tch {tch} is made for torch 2.{wanted}"),
            format!(
                "install torch 2.{wanted} and set LIBTORCH to it, or choose another tch with `cargo update tch --precise`"
            ),
        ),
        (None, _) => Finding::good("torch", format!("{torch}, with tch {tch}")),
    }
}

fn abi(cxx11: bool) -> Finding {
    match cxx11 {
        true => Finding::good("C++ ABI", "C++11, as in all wheels since torch 2.6"),
        false => Finding::note(
            "C++ ABI",
            "the one before C++11",
            "where linking fails, set LIBTORCH_CXX11_ABI=1 or take a newer libtorch",
        ),
    }
}

/// A sum that libtorch computes.
fn works() -> Finding {
    let sum = tch::Tensor::f_arange(5, (tch::Kind::Double, tch::Device::Cpu))
        .and_then(|tensor| tensor.f_sum(tch::Kind::Double))
        .map(|sum| sum.double_value(&[]));
    match sum {
        Ok(10.0) => Finding::good("compute", "a sum on the CPU is right"),
        Ok(other) => Finding::blocks("compute", format!("0 + 1 + 2 + 3 + 4 came to {other}"), "install libtorch anew"),
        Err(error) => Finding::blocks("compute", error.to_string(), "install libtorch anew"),
    }
}

/// Where the libraries were found, and whether they are those that this was built with.
fn libraries(torch: &str, built_with: &Path, loaded: &[PathBuf]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut folders: Vec<&Path> = loaded.iter().filter_map(|file| file.parent()).collect();
    folders.sort_unstable();
    folders.dedup();
    for folder in &folders {
        let names: Vec<_> = loaded
            .iter()
            .filter(|file| file.parent() == Some(*folder))
            .filter_map(|file| Some(file.file_name()?.to_string_lossy().into_owned()))
            .collect();
        let text = format!("{} in {}", names.join(", "), folder.display());
        let version = version_beside(folder);
        let other = version.as_deref().filter(|version| version.split('+').next() != Some(torch));
        findings.push(match other {
            Some(version) => Finding::blocks(
                "libraries",
                format!("{text} are of torch {version}, but this was built with {torch}"),
                format!("unset LD_LIBRARY_PATH, or build again with LIBTORCH={}", folder.display()),
            ),
            None => Finding::good("libraries", text),
        });
    }
    if folders.len() > 1 {
        let mend = "unset LD_LIBRARY_PATH, or let it name one folder alone";
        findings.push(Finding::blocks("libraries", format!("they come from {} folders", folders.len()), mend));
    } else if folders.first().is_some_and(|folder| !same(folder, built_with)) {
        let mend = "unset LD_LIBRARY_PATH if that is not meant";
        findings.push(Finding::note("libraries", format!("this was built with {}", built_with.display()), mend));
    }
    findings
}

fn same(a: &Path, b: &Path) -> bool {
    let canonical = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    canonical(a) == canonical(b)
}

/// The version of the torch that a folder of libraries belongs to, where a file beside it tells.
fn version_beside(libraries: &Path) -> Option<String> {
    let root = libraries.parent()?;
    let zip = fs::read_to_string(root.join("build-version")).ok();
    let wheel = || {
        let text = fs::read_to_string(root.join("version.py")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
        Some(line.trim_matches(['\'', '"', ' ']).to_owned())
    };
    zip.map(|text| text.trim().to_owned()).or_else(wheel)
}

/// Whether this machine has NVIDIA's driver.
fn has_driver() -> bool {
    Path::new("/proc/driver/nvidia/version").exists()
}

fn cuda_state(compiled: Option<&str>, driver: bool, devices: usize) -> Finding {
    match (compiled, driver, devices) {
        (Some(version), _, 1..) => {
            Finding::good("CUDA", format!("{version}, {devices} devices: training runs on them"))
        }
        (Some(version), true, 0) => Finding::note(
            "CUDA",
            format!("{version}, but libtorch sees no device, though there is a driver: training runs on the CPU"),
            "look at CUDA_VISIBLE_DEVICES and at `nvidia-smi`; the driver may be older than this CUDA",
        ),
        (Some(version), false, 0) => Finding::good("CUDA", format!("{version}, no device: training runs on the CPU")),
        (None, true, _) => Finding::note(
            "CUDA",
            "this libtorch has none, though there is a driver: training runs on the CPU",
            "build with a libtorch that has CUDA",
        ),
        (None, false, _) => Finding::good("CUDA", "none, and no driver: training runs on the CPU"),
    }
}

/// The devices by the names that the driver gives them.
fn devices() -> Vec<Finding> {
    let entries = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let model = |text: String| text.lines().find_map(|line| Some(line.strip_prefix("Model:")?.trim().to_owned()));
    let models = entries.filter_map(|entry| model(fs::read_to_string(entry.path().join("information")).ok()?));
    models
        .map(|name| match crate::metrics::peak_tflops(&name) {
            Some(peak) => Finding::good("device", format!("{name}, {peak} TFLOP/s at most")),
            None => {
                Finding::note("device", format!("{name}, of unknown peak"), "set metrics.peak_tflops to have an MFU")
            }
        })
        .collect()
}

fn nccl(available: Result<(), String>, devices: usize) -> Finding {
    match available {
        Ok(()) => Finding::good("NCCL", "ranks can be processes on GPUs"),
        Err(why) if devices > 1 => {
            Finding::blocks("NCCL", why, "build again where the headers of CUDA and NCCL are found")
        }
        Err(why) => Finding::good("NCCL", format!("not available, and not needed here: {why}")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_tch_for_another_torch_blocks() {
        assert_eq!(fits("2.13.0", "0.26.0").state, State::Good);
        assert_eq!(fits("2.11.0", "0.24.0").state, State::Good);
        let finding = fits("2.11.0", "0.26.0");
        assert_eq!(finding.state, State::Blocks);
        assert!(finding.text.contains("2.13"), "{}", finding.text);
    }

    #[test]
    fn libraries_of_another_torch_block() {
        let root = tempfile::tempdir().unwrap();
        let lib = root.path().join("lib");
        fs::create_dir(&lib).unwrap();
        let loaded = [lib.join("libc10.so"), lib.join("libtorch_cpu.so")];
        assert_eq!(libraries("2.13.0", &lib, &loaded).len(), 1);
        fs::write(root.path().join("version.py"), "__version__ = '2.13.0+cu130'\n").unwrap();
        assert_eq!(libraries("2.13.0", &lib, &loaded)[0].state, State::Good);
        fs::write(root.path().join("build-version"), "2.11.0+cpu\n").unwrap();
        assert_eq!(libraries("2.13.0", &lib, &loaded)[0].state, State::Blocks);
        // From two folders.
        let mixed = [lib.join("libc10.so"), root.path().join("libtorch_cpu.so")];
        assert!(libraries("2.11.0", &lib, &mixed).iter().any(|finding| finding.state == State::Blocks));
        // From one, but another.
        assert_eq!(libraries("2.11.0", Path::new("/elsewhere"), &loaded)[1].state, State::Note);
    }

    #[test]
    fn a_driver_that_is_not_used_is_noted() {
        assert_eq!(cuda_state(Some("13.0"), true, 2).state, State::Good);
        assert_eq!(cuda_state(Some("13.0"), false, 0).state, State::Good);
        assert_eq!(cuda_state(Some("13.0"), true, 0).state, State::Note);
        assert_eq!(cuda_state(None, true, 0).state, State::Note);
        assert_eq!(nccl(Err("no headers".into()), 2).state, State::Blocks);
        assert_eq!(nccl(Err("no headers".into()), 0).state, State::Good);
    }
}
