//! The binary, from the outside.
#![allow(clippy::unwrap_used)]

use assert_cmd::Command;
use std::fs;
use std::time::Duration;

fn ferrotitan() -> Command {
    let mut command = Command::cargo_bin("ferrotitan").unwrap();
    // Colors would come between the words, and this test may itself run as a rank.
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CLICOLOR_FORCE"]
    {
        command.env_remove(name);
    }
    command.timeout(Duration::from_secs(60));
    command
}

/// Exit code, standard output and standard error.
fn run(words: &[&str]) -> (i32, String, String) {
    let output = ferrotitan().args(words).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_good_config_is_fine() {
    let preset = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/llama3_debugmodel.toml");
    let (code, out, err) = run(&["config", "check", preset]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("5247232 parameters; 1 ranks"), "{out}");
}

#[test]
fn mistakes_go_to_standard_error_without_color() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.toml");
    fs::write(&file, "[training]\nseqlen = 1\nsteps = \"x\"\n").unwrap();
    let (code, out, err) = run(&["config", "check", file.to_str().unwrap(), "--training.seq_len=0"]);
    assert_eq!((code, out.as_str()), (1, ""));
    for part in ["bad.toml:2:1", "bad.toml:3:1", "--training.seq_len=0", "3 mistakes in"] {
        assert!(err.contains(part), "{part} is not in {err}");
    }
    assert!(!err.contains('\x1b'), "{err}");
    // The same before a run, which does not start.
    let (code, _, err) = run(&["train", file.to_str().unwrap()]);
    assert!(code == 1 && err.contains("2 mistakes in"), "{err}");
}

#[test]
fn what_is_shown_is_fine() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shown.toml");
    let (code, shown, _) = run(&["config", "show", "--training.steps", "7", "--model.vocab_size=300"]);
    assert_eq!(code, 0);
    assert!(shown.contains("# Steps of the run.\nsteps = 7\n"), "{shown}");
    fs::write(&file, &shown).unwrap();
    let (code, _, err) = run(&["config", "check", "--job.config_file", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
    let (_, again, _) = run(&["config", "show", "--config", file.to_str().unwrap()]);
    assert_eq!(again, shown);
    let (_, json, _) = run(&["config", "show", file.to_str().unwrap(), "--format", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json["training"]["steps"].as_u64(), json["model"]["vocab_size"].as_u64()), (Some(7), Some(300)));
}

#[test]
fn a_command_line_without_sense_is_another_code() {
    for words in [
        &["trian"][..],
        &["train", "--nproc", "0"],
        &["train", "--nnodes", "2"],
        &["train", "--node-rank", "1"],
        &["train", "a.toml", "--job.config_file", "b.toml"],
        &["config", "show", "--format", "yaml"],
        &["doctor", "--training.steps", "1"],
    ] {
        let (code, out, err) = run(words);
        assert_eq!((code, out.as_str()), (2, ""), "{words:?}");
        assert!(err.contains("error"), "{err}");
    }
    assert_eq!(run(&["--help"]).0, 0);
    assert_eq!(run(&["--version"]).0, 0);
}

#[test]
fn files_that_are_none() {
    let (code, _, err) = run(&["config", "check", "no/such/file.toml"]);
    assert!(code == 1 && err.contains("cannot read the config no/such/file.toml"), "{err}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bytes.toml");
    fs::write(&file, b"[job]\ndescription = \"\xff\"\n").unwrap();
    let (code, _, err) = run(&["config", "check", file.to_str().unwrap()]);
    assert!(code == 1 && err.contains("not UTF-8"), "{err}");
    let (code, _, err) = run(&["config", "check", folder.path().to_str().unwrap()]);
    assert!(code == 1 && err.contains("cannot read the config"), "{err}");
}

#[test]
fn a_product_that_is_not_the_world_size_stops_a_run() {
    let one = "--parallelism.data_parallel_shard_degree=1";
    let (code, _, err) = run(&["train", "--nproc", "3", one, "--parallelism.data_parallel_replicate_degree", "2"]);
    assert_eq!(code, 1);
    assert!(err.contains("3 ranks of `--nproc 3`") && err.contains("start 2 ranks"), "{err}");
    let mut command = ferrotitan();
    command
        .args(["train", one])
        .env("RANK", "0")
        .env("WORLD_SIZE", "4")
        .env("LOCAL_RANK", "0")
        .env("LOCAL_WORLD_SIZE", "4");
    let output = command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "1").output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && err.contains("4 ranks of WORLD_SIZE=4"), "{err}");
}

#[test]
fn half_an_environment_is_refused() {
    let output = ferrotitan().arg("train").env("RANK", "0").output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && err.contains("WORLD_SIZE"), "{err}");
}

#[test]
fn the_doctor_finds_this_build_well() {
    let (code, out, err) = run(&["doctor"]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    for part in ["torch", "libtorch_cpu.so", "threads", "memory", "a training run can start"] {
        assert!(out.contains(part), "{part} is not in {out}");
    }
    assert!(!out.contains('\x1b'));
}

#[test]
fn schedules_are_drawn_and_read_back() {
    let words = ["schedule", "Interleaved1F1B", "--pp", "2", "--microbatches", "4", "--stages-per-rank", "2"];
    let (code, picture, figures) = run(&words);
    assert_eq!(code, 0, "{figures}");
    assert!(picture.lines().count() >= 2, "{picture}");
    assert!(figures.contains("makespan"), "{figures}");
    let (code, csv, _) = run(&[&words[..], &["--format", "csv"]].concat());
    assert_eq!(code, 0);
    assert!(csv.starts_with("0F0,0F1,2F0,2F1,"), "{csv}");
    let (_, svg, _) = run(&[&words[..], &["--format", "svg"]].concat());
    assert!(svg.starts_with("<svg"), "{svg}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("own.csv");
    fs::write(&file, &csv).unwrap();
    let file = file.to_str().unwrap();
    let (code, again, _) = run(&["schedule", file, "--format", "csv"]);
    assert_eq!((code, again), (0, csv));
    // A file for another number of ranks.
    let (code, _, err) = run(&["schedule", file, "--pp", "4"]);
    assert!(code == 1 && err.contains("--pp 2"), "{err}");
}

#[test]
fn unsound_schedules_are_refused_with_the_action_that_cannot_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("unsound.csv");
    fs::write(&file, "0F0,0B0\n1B0,1F0\n").unwrap();
    let (code, _, err) = run(&["schedule", file.to_str().unwrap()]);
    assert!(code == 1 && err.contains("1B0"), "{err}");
    fs::write(&file, "0F0,0X0\n").unwrap();
    let (code, _, err) = run(&["schedule", file.to_str().unwrap()]);
    assert!(code == 1 && err.contains("0X0"), "{err}");
    let (code, _, err) = run(&["schedule", "2F2B", "--pp", "2", "--microbatches", "2"]);
    assert!(code == 1 && err.contains("1F1B"), "{err}");
    let (code, _, err) = run(&["schedule", "1F1B"]);
    assert!(code == 2 && err.contains("--microbatches"), "{err}");
}
