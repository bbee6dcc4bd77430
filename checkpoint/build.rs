//! Lets tests and examples find libtorch without `LD_LIBRARY_PATH`.

fn main() {
    if let Ok(folder) = std::env::var("DEP_FERROTITAN_EXT_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
