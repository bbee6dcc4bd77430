//! The binary `ferrotitan`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ferrotitan_trainer::cli::main(std::env::args_os())
}
