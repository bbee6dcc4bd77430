//! `ferrotitan ablate`, from the outside.
#![allow(clippy::unwrap_used)]

#[path = "support/matrix.rs"]
mod matrix;

use matrix::Matrix;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn every_mistake_of_a_matrix_comes_at_once() {
    let matrix = Matrix::new(
        r#"
        stepps = 3
        timeout = 0
        reference = "nobody"
        exclude = [{ tp = "maybe", cp = "on" }]
        [references.single]
        tolerance = -1
        [references.other]
        training.sequence_length = 3
        [axes]
        "training.steps" = []
        [axes.tp]
        off = {}
        on = { parallelism.tensor_parallel_degree = "two" }
        [axes.again]
        on = { parallelism.tensor_parallel_degree = 2, surprise = 1 }
        [[cells]]
        name = "../up"
        [[cells]]
        then = []
        tolerance = { loss = 1.0 }
        "#,
    );
    let (code, _, err) = matrix.run(&[]);
    assert_eq!(code, 1, "{err}");
    for part in [
        "`stepps` is no word of a matrix",
        "`timeout` must be a whole number",
        "no reference \"nobody\"",
        "the axis tp has no value maybe",
        "there is no axis cp",
        "reference single: `tolerance` must be a number",
        "reference other: `tolerance` is missing",
        "axis training.steps: must be a list",
        "axis tp, value on",
        "axis again, value on: `surprise` is no key",
        "the axes tp and again both set `parallelism.tensor_parallel_degree`",
        "cell cannot be called \"../up\"",
        "cell 2: `name` is missing",
        "cell 2: `then` must be a list",
        "cell 2: `tolerance` must be a number",
        "matrix.toml:",
    ] {
        assert!(err.contains(part), "{part} is not in\n{err}");
    }
    assert!(!matrix.out().exists());
}

#[test]
fn no_cell_is_run_where_one_cannot_be() {
    let text = r#"
        SKIP
        [axes.tp]
        off = {}
        on = { parallelism.tensor_parallel_degree = 8 }
        [axes]
        "training.seq_len" = [16, 32]
        [[cells]]
        name = "odd-batch"
        training.global_batch_size = 7
        "#;
    let (code, _, err) = Matrix::new(&text.replace("SKIP", "")).run(&[]);
    assert_eq!(code, 1);
    for part in
        ["tp+seq_len=16, tp+seq_len=32: 4 heads cannot be dealt to 8", "odd-batch: a global batch of 7", "2 mistakes"]
    {
        assert!(err.contains(part), "{part} is not in\n{err}");
    }
    let (code, _, err) = Matrix::new(&text.replace("SKIP", "skip_illegal = [\"heads\"]")).run(&[]);
    assert!(code == 1 && err.contains("1 mistake in") && !err.contains("heads"), "{err}");
}

#[test]
fn a_failing_cell_is_named_and_the_others_are_compared() {
    let matrix = Matrix::new(
        r#"
        skip_illegal = ["heads"]
        [references.single]
        tolerance = 1e-10
        [axes.fsdp]
        off = {}
        on = { parallelism.data_parallel_shard_degree = 2 }
        [axes.tp]
        off = {}
        on = { parallelism.tensor_parallel_degree = 2 }
        [[cells]]
        name = "impossible"
        parallelism.tensor_parallel_degree = 8
        [[cells]]
        name = "no-text"
        training.dataset_path = "nowhere"
        [[cells]]
        name = "other-seed"
        debug.seed = 9
        "#,
    );
    let (code, out, err) = matrix.run(&[]);
    assert_eq!(code, 1, "{out}{err}");
    assert!(out.contains("FAILED no-text: ended with exit status: 1"), "{out}");
    assert!(out.lines().any(|line| line.starts_with("    ") && line.contains("nowhere")), "{out}");
    assert!(out.contains("DEVIATES other-seed: loss off by"), "{out}");
    assert!(out.contains("7 cells: 4 same, 1 deviates, 1 failed, 1 left out"), "{out}");

    let results = matrix.results();
    let cells = results["cells"].as_array().unwrap();
    let page = std::fs::read_to_string(matrix.out().join("report.html")).unwrap();
    for cell in cells {
        let name = cell["name"].as_str().unwrap();
        assert!(page.contains(&format!("\">{name}<td")), "{name} is not on the page");
    }
    assert!(!page.contains("http"), "the page needs nothing else");
    let both = cells.iter().find(|cell| cell["name"] == "fsdp+tp").unwrap();
    assert_eq!((&both["verdict"], &both["ranks"]), (&"same".into(), &4.into()));
    assert!(both["deviation"]["loss"].as_f64().unwrap() < 1e-10);
    assert!(both["cost"]["bytes_sent"]["tp"].as_u64().unwrap() > 0, "{both}");
    assert!(both["cost"]["state_bytes"].as_u64().unwrap() > 0, "{both}");
    let effects: Vec<&str> =
        results["effects"].as_array().unwrap().iter().map(|e| e["axis"].as_str().unwrap()).collect();
    assert_eq!(effects, ["fsdp", "tp"]);

    // Again: what failed is run again, and nothing else.
    let (code, _, err) = matrix.run(&[]);
    assert_eq!(code, 1);
    assert_eq!(err.matches("finished earlier").count(), 6, "{err}");
    // Other settings are other cells.
    let (_, _, err) = matrix.run(&["--training.steps=2"]);
    assert_eq!(err.matches("finished earlier").count(), 0, "{err}");
    let (code, out, _) = matrix.run(&["--training.steps=2", "--no-run"]);
    assert!(code == 1 && out.contains("4 same"), "{out}");
}

#[test]
fn an_interrupted_matrix_goes_on() {
    let matrix = Matrix::new(
        r#"
        [axes]
        "debug.seed" = [1, 2, 3]
        [[cells]]
        name = "long"
        training.steps = 100000
        "#,
    );
    let mut child = matrix.command(&["--jobs=1"]).stderr(Stdio::null()).spawn().unwrap();
    let torn = matrix.out().join("cells/long/metrics.jsonl");
    let began = Instant::now();
    while !torn.is_file() {
        assert!(began.elapsed() < Duration::from_secs(100), "the last cell does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // Nobody is left who writes.
    let length = || std::fs::metadata(&torn).unwrap().len();
    let before = length();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(length(), before);

    matrix.rewrite("100000", "4");
    let (code, out, err) = matrix.run(&[]);
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(err.matches("finished earlier").count(), 3, "{err}");
    assert!(out.contains("4 cells: all ran"), "{out}");
    assert_eq!(std::fs::read_to_string(&torn).unwrap().lines().count(), 4);
}

#[test]
fn too_long_is_a_failure() {
    let matrix = Matrix::new("timeout = 3\n[[cells]]\nname = \"long\"\ntraining.steps = 1000000\n");
    let (code, out, _) = matrix.run(&[]);
    assert!(code == 1 && out.contains("FAILED long: took longer than 3 s"), "{out}");
}

#[cfg(feature = "checkpoint")]
#[test]
fn further_runs_must_go_on() {
    let matrix = Matrix::new(
        r#"
        [references.single]
        tolerance = 1e-10
        training.steps = 6
        [[cells]]
        name = "saved"
        checkpoint.enable = true
        checkpoint.last_save_model_only = false
        parallelism.data_parallel_shard_degree = 2
        then = [{ training.steps = 6, parallelism.data_parallel_shard_degree = 1, parallelism.tensor_parallel_degree = 2 }]
        [[cells]]
        name = "begun-again"
        then = [{ training.steps = 6 }]
        "#,
    );
    let (code, out, err) = matrix.run(&[]);
    assert_eq!(code, 1, "{out}{err}");
    assert!(out.contains("FAILED begun-again: a further run began with step 1 again"), "{out}");
    assert!(out.contains("2 cells: 1 same, 1 failed"), "{out}");
}

#[test]
fn cells_as_commands() {
    let matrix = Matrix::new("[axes.tp]\noff = {}\non = { parallelism.tensor_parallel_degree = 2 }\n");
    let script = matrix.folder().join("run.sh");
    let file = script.to_str().unwrap();
    let (code, _, err) = matrix.run(&["--write-commands", file]);
    assert_eq!(code, 0, "{err}");
    let local = std::fs::read_to_string(&script).unwrap();
    assert!(
        local.contains("\nferrotitan train ") && local.contains("--parallelism.tensor_parallel_degree=2"),
        "{local}"
    );
    assert!(!matrix.out().join("cells").exists());
    let (code, _, err) = matrix.run(&["--write-commands", file, "--gpus=8", "--srun"]);
    assert_eq!(code, 0, "{err}");
    let slurm = std::fs::read_to_string(&script).unwrap();
    assert!(slurm.contains("srun --ntasks=2 --ntasks-per-node=2 --gpus-per-node=2 sh -c"), "{slurm}");
    assert_eq!(matrix.run(&["--srun"]).0, 2, "--srun alone makes no sense");
}
