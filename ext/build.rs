//! Compiles the shim against the libtorch that `torch-sys` found, and tells dependents where that is.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(nccl)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=shim");
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        println!("cargo::rustc-env=FERROTITAN_LIBTORCH_LIB=");
        println!("cargo::rustc-env=FERROTITAN_LIBTORCH_CUDA=");
        return;
    }
    let lib = PathBuf::from(env::var_os("DEP_TCH_LIBTORCH_LIB").expect("torch-sys tells where libtorch is"));
    let include = include_dirs(&lib);
    let cuda = cuda_version(&lib);

    shim(&include, &["autograd", "c10d", "device", "tensor"]).compile("ferrotitan_shim");
    let nccl = nccl_headers(&lib, &cuda).and_then(|headers| {
        let mut build = shim(&[include.clone(), headers].concat(), &["nccl"]);
        build.define("FT_NCCL", None);
        build.try_compile("ferrotitan_nccl").map_err(|error| format!("it did not compile: {error}"))
    });
    match &nccl {
        Ok(()) => println!("cargo::rustc-cfg=nccl"),
        Err(why) => {
            let mut build = shim(&include, &["nccl"]);
            build.define("FT_NCCL_MISSING", format!("{why:?}").as_str());
            build.compile("ferrotitan_nccl");
        }
    }

    println!("cargo::rustc-link-search=native={}", lib.display());
    for library in ["torch_cpu", "c10"] {
        println!("cargo::rustc-link-lib={library}");
    }
    if nccl.is_ok() {
        println!("cargo::rustc-link-lib=torch_cuda");
    }
    // Reaches this package's own tests and examples; dependents do the same in theirs (README).
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo::metadata=libtorch_lib={}", lib.display());
    println!("cargo::rustc-env=FERROTITAN_LIBTORCH_LIB={}", lib.display());
    println!("cargo::rustc-env=FERROTITAN_LIBTORCH_CUDA={cuda}");
}

fn shim(include: &[PathBuf], files: &[&str]) -> cc::Build {
    let abi = variable("LIBTORCH_CXX11_ABI").unwrap_or_else(|| "1".to_owned());
    let mut build = cc::Build::new();
    // Optimized and quiet in every profile: the headers of libtorch warn, and are slow to run unoptimized.
    build.cpp(true).std("c++17").opt_level(1).debug(false).warnings(false).flag("-w").include("shim/gloo_stub");
    build.includes(include).define("_GLIBCXX_USE_CXX11_ABI", abi.as_str());
    build.define("USE_DISTRIBUTED", None).define("USE_C10D_GLOO", None);
    build.files(files.iter().map(|file| format!("shim/{file}.cpp")));
    build
}

/// The wheel and the zip of libtorch both have the headers beside the libraries.
fn include_dirs(lib: &Path) -> Vec<PathBuf> {
    let root = variable("LIBTORCH_INCLUDE").map_or_else(|| parent(lib), PathBuf::from);
    vec![root.join("include"), root.join("include/torch/csrc/api/include")]
}

/// The version of CUDA that libtorch was built for; empty for none.
fn cuda_version(lib: &Path) -> String {
    if !lib.join("libtorch_cuda.so").exists() {
        return String::new();
    }
    let root = parent(lib);
    // The wheel says `cuda: Optional[str] = '13.0'`, the zip `2.13.0+cu130`.
    let from_wheel = fs::read_to_string(root.join("version.py")).ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("cuda"))?;
        Some(line.split('\'').nth(1)?.to_owned())
    });
    let from_zip =
        || fs::read_to_string(root.join("build-version")).ok()?.trim().split_once("+cu").map(|it| it.1.to_owned());
    from_wheel.or_else(from_zip).unwrap_or_else(|| "unknown".to_owned())
}

/// Folders with the headers of CUDA and NCCL, or what is missing.
fn nccl_headers(lib: &Path, cuda: &str) -> Result<Vec<PathBuf>, String> {
    if cuda.is_empty() {
        return Err("this libtorch was built without CUDA; install one that has it".to_owned());
    }
    if variable("FERROTITAN_NCCL").is_some_and(|value| value == "0") {
        return Err("the build was told to leave it out by FERROTITAN_NCCL=0".to_owned());
    }
    let mut folders = Vec::new();
    // The wheel's own dependencies lie beside it: `nvidia/nccl`, `nvidia/cu13` or `nvidia/cuda_runtime`, ...
    if let Ok(entries) = fs::read_dir(parent(&parent(lib)).join("nvidia")) {
        folders.extend(entries.flatten().map(|entry| entry.path().join("include")));
        folders.sort();
    }
    let homes = ["CUDA_HOME", "CUDA_PATH", "NCCL_HOME"].into_iter().filter_map(variable);
    for home in homes.chain(["/usr/local/cuda".to_owned(), "/usr".to_owned()]) {
        // Since CUDA 13 the toolkit has `nv` in a folder of its own.
        folders.extend(["include", "include/cccl"].map(|folder| Path::new(&home).join(folder)));
    }

    let headers = ["nccl.h", "cuda_runtime.h", "crt/host_defines.h", "nv/target"];
    let mut found = Vec::new();
    for header in headers {
        let Some(folder) = folders.iter().find(|folder| folder.join(header).exists()) else {
            return Err(format!(
                "it was not compiled in, since {header} was not found; install the CUDA toolkit and set CUDA_HOME, or \
                 beside the torch wheel those of nvidia-nccl, nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl"
            ));
        };
        // The compiler looks in /usr/include anyway, and must not look there before its own folders.
        if !found.contains(folder) && folder != Path::new("/usr/include") {
            found.push(folder.clone());
        }
    }
    Ok(found)
}

fn parent(path: &Path) -> PathBuf {
    path.parent().expect("libtorch's folder of libraries lies in another folder").to_owned()
}

fn variable(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok().filter(|value| !value.is_empty())
}
