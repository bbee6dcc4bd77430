//! Which libtorch this is, and how it was built.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;

use crate::ffi;

/// The version of libtorch that the shim was compiled against, such as `2.13.0`.
pub fn torch_version() -> String {
    // SAFETY: a string constant of the shim.
    unsafe { CStr::from_ptr(ffi::ft_torch_version()) }.to_string_lossy().into_owned()
}

/// Whether the shim was compiled for libstdc++'s C++11 ABI, which libtorch has to share.
pub fn cxx11_abi() -> bool {
    // SAFETY: no preconditions.
    unsafe { ffi::ft_cxx11_abi() }
}

/// The folder of the libtorch that the shim was linked with; empty in a `doc-only` build.
pub fn lib_dir() -> &'static Path {
    Path::new(env!("FERROTITAN_LIBTORCH_LIB"))
}

/// The CUDA version of the libtorch that the shim was compiled against, such as `13.0`; `None` for one without CUDA.
pub fn cuda_version() -> Option<&'static str> {
    Some(env!("FERROTITAN_LIBTORCH_CUDA")).filter(|version| !version.is_empty())
}

/// Whether Gloo was compiled in. It is part of every libtorch for Linux.
pub fn gloo_compiled() -> bool {
    !cfg!(feature = "doc-only")
}

/// Whether NCCL was compiled in, for which the build needs CUDA's and NCCL's headers.
/// [`crate::process_group::nccl_available`] tells whether it can be used, and why not.
pub fn nccl_compiled() -> bool {
    cfg!(nccl)
}

/// The files of libtorch that this process has loaded, from Linux's `/proc`.
pub fn loaded_libraries() -> Vec<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    parse_maps(&maps).into_iter().collect()
}

fn parse_maps(maps: &str) -> BTreeSet<PathBuf> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libtorch") || name.starts_with("libc10")
        })
        .collect()
}

/// libtorch's own account of its threads and libraries, over several lines.
pub fn parallel_info() -> String {
    // SAFETY: no preconditions; the string is ours.
    ffi::take_string(unsafe { ffi::ft_parallel_info() }).unwrap_or_default()
}

/// Makes libtorch choose deterministic kernels, and fail where there is none.
pub fn set_deterministic(value: bool) {
    // SAFETY: no preconditions.
    unsafe { ffi::ft_set_deterministic(value) };
}

/// Whether [`set_deterministic`] is on.
pub fn deterministic() -> bool {
    // SAFETY: no preconditions.
    unsafe { ffi::ft_deterministic() }
}

/// See [`crate::cuda::load`].
pub(crate) fn load_cuda() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if cuda_version().is_some() {
            let path = lib_dir().join("libtorch_cuda.so");
            let path = std::ffi::CString::new(path.into_os_string().into_encoded_bytes()).unwrap_or_default();
            // SAFETY: a nul-terminated path of the libtorch that this program is linked with.
            unsafe { ffi::ft_load_cuda(path.as_ptr()) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::parse_maps;

    #[test]
    fn finds_each_library_once() {
        let maps = [
            "7f00-7f01 r-xp 0 08:01 1 /opt/a b/lib/libtorch_cpu.so",
            "7f01-7f02 r--p 0 08:01 1 /opt/a b/lib/libtorch_cpu.so",
            "7f03-7f04 r--p 0 08:01 2 /usr/lib/libc.so.6",
            "7f05-7f06 rw-p 0 00:00 0 ",
            "7f07-7f08 r--p 0 08:01 3 /opt/lib/libc10.so",
        ]
        .join("\n");
        let found: Vec<_> = parse_maps(&maps).into_iter().map(|path| path.display().to_string()).collect();
        assert_eq!(found, ["/opt/a b/lib/libtorch_cpu.so", "/opt/lib/libc10.so"]);
    }
}
