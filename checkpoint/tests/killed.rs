//! Processes that are killed while they save: whatever they leave, the last step that was there still is, whole.

#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]
#![cfg(unix)]

mod shards;

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use ferrotitan_checkpoint::comm::{BoxError, threads};
use ferrotitan_checkpoint::mesh::{Degrees, Layout, Mesh, Parts, View};
use ferrotitan_checkpoint::{Checkpoint, Dtype, Error, Mode, SaveOptions, Saver, Store, Which, steps};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shards::Global;

const FOLDER: &str = "FERROTITAN_CHECKPOINT_TEST_FOLDER";

fn model(step: u64) -> Vec<Global> {
    vec![Global::new("a", Dtype::F32, &[12, 1 << 18], step), Global::new("b", Dtype::Bf16, &[5, 7], step)]
}

/// Saves step after step, from where it finds itself, until it is killed; says when it begins one.
fn save_on(address: &str) {
    let two = Degrees { dp_shard: 2, ..Degrees::default() };
    threads::run(two, &threads::Options::default(), |mesh| -> Result<(), BoxError> {
        let store = Store::open(address)?;
        let options =
            SaveOptions { mode: Mode::Async, keep_latest_k: 2, file_bytes: 3 << 20, ..SaveOptions::default() };
        let first = steps(&store)?.last().map_or(1, |step| step + 1);
        mesh.world().barrier()?;
        let mut saver = Saver::new(store, mesh.clone(), options);
        for step in first.. {
            let layout = |global: &Global| Layout::replicated(&global.shape).shard(View::DP_SHARD, 0, Parts::Even);
            let items = model(step).into_iter().map(|global| Ok::<_, BoxError>(global.item(&layout(&global)?, &mesh)));
            let items: Vec<_> = items.collect::<Result<_, _>>()?;
            if mesh.rank() == 0 {
                println!("step {step}");
            }
            saver.save(step, items, serde_json::json!({ "step": step }))?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_killed_process_loses_no_step() {
    if let Ok(address) = env::var(FOLDER) {
        return save_on(&address);
    }
    let folder = tempfile::tempdir().unwrap();
    let address = folder.path().to_str().unwrap();
    let store = Store::open(address).unwrap();
    let mut latest = 0;
    for delay in [0, 3, 8, 15, 25, 40, 60, 90] {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["a_killed_process_loses_no_step", "--exact", "--nocapture"])
            .env(FOLDER, address)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Two steps are begun, so that one is there; then somewhere in the second.
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut begun = lines.filter(|line| line.starts_with("step "));
        assert!(begun.nth(1).is_some(), "the child ended by itself");
        thread::sleep(Duration::from_millis(delay));
        kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL).unwrap();
        child.wait().unwrap();

        match Checkpoint::open(&store, Which::Latest) {
            Ok(checkpoint) => {
                assert!(checkpoint.step() >= latest, "step {latest} was there");
                latest = checkpoint.step();
                checkpoint.verify(|_| ()).unwrap();
                for global in model(latest) {
                    assert!(global.is_in(&checkpoint).unwrap(), "step {latest}");
                }
            }
            Err(error) => assert!(matches!(error, Error::NoStep { .. }) && latest == 0, "{error}"),
        }
    }
    println!("the last of the steps is {latest}");
    assert!(latest > 0);
}
