//! Lets the binary and the tests find libtorch by themselves, and tells `doctor` which `tch` this is built with.

use std::env;
use std::fs;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Not set where there is no libtorch: documentation and lints alone.
    if let Ok(lib) = env::var("DEP_FERROTITAN_EXT_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    }
    println!("cargo::rustc-env=FERROTITAN_TCH_VERSION={}", tch_version().unwrap_or_default());
}

/// The version of `tch` in the lock file of this package, or of the workspace that it is in.
fn tch_version() -> Option<String> {
    let folder = env::var_os("CARGO_MANIFEST_DIR")?;
    let lock = Path::new(&folder).ancestors().map(|folder| folder.join("Cargo.lock")).find(|lock| lock.is_file())?;
    println!("cargo::rerun-if-changed={}", lock.display());
    let text = fs::read_to_string(lock).ok()?;
    let mut lines = text.lines().skip_while(|line| *line != "name = \"tch\"").skip(1);
    Some(lines.next()?.strip_prefix("version = ")?.trim_matches('"').to_owned())
}
