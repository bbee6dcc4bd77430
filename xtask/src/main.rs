//! `cargo xtask COMMAND`: what a newcomer and the continuous integration run.
//!
//! | file | holds |
//! |---|---|
//! | `libtorch.rs` | which libtorch is used, and fetching it |
//! | `environment.rs` | what the commands know of this machine and workspace |
//! | `train.rs`, `test.rs`, `ci.rs` | the command of that name |
//! | `alone.rs` | each crate with each of its features, and as somebody's one dependency |
//! | `tidy.rs`, `layers.rs` | the rules of the house that no compiler checks |

mod alone;
mod ci;
mod environment;
mod layers;
mod libtorch;
mod test;
mod tidy;
mod train;

use environment::{Outcome, Workspace};
use std::process::ExitCode;

const HELP: &str = "\
cargo xtask COMMAND

  train [ARGS]   fetch libtorch, build, and run `ferrotitan train ARGS`
  test [ARGS]    run every test, or those that ARGS (of cargo-nextest, or of cargo test) select
  cargo ARGS     run cargo with the environment that these commands use, for example `cargo xtask cargo build`
  env            print that environment: eval \"$(cargo xtask env)\"
  tidy           check the rules that no compiler checks
  ci             everything above, formatting, lints and documentation

libtorch is fetched once into the user's cache folder, unless LIBTORCH or LIBTORCH_USE_PYTORCH names one.
";

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let command = args.next().unwrap_or_default();
    let args: Vec<_> = args.collect();
    let workspace = Workspace::here();
    let outcome = match command.to_str().unwrap_or_default() {
        "train" => train::run(&workspace, &args),
        "test" => test::run(&workspace, &args),
        "cargo" => cargo(&workspace, &args),
        "env" => print_environment(&workspace),
        "tidy" => tidy::run(&workspace),
        "ci" => ci::run(&workspace),
        "" | "help" | "-h" | "--help" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("there is no command `{other}`\n\n{HELP}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {}", message.trim_end());
            ExitCode::FAILURE
        }
    }
}

fn cargo(workspace: &Workspace, args: &[std::ffi::OsString]) -> Outcome {
    let torch = libtorch::locate(workspace)?;
    environment::execute(workspace.cargo().envs(torch.vars()).args(args))
}

fn print_environment(workspace: &Workspace) -> Outcome {
    for (name, value) in libtorch::locate(workspace)?.vars() {
        // Single quotes keep everything but themselves.
        println!("export {name}='{}'", value.to_string_lossy().replace('\'', r"'\''"));
    }
    Ok(())
}
