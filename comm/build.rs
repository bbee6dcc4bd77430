//! Lets this package's tests and examples find libtorch where it was found at build time.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DEP_FERROTITAN_EXT_LIBTORCH_LIB");
    if let Ok(lib) = std::env::var("DEP_FERROTITAN_EXT_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    }
}
