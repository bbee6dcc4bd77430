//! What cannot be trained ends in one clear error, and nothing hangs.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead as _, BufReader};
use std::time::{Duration, Instant};

use support::{Run, finish};

fn assert_says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "{word:?} is not in:\n{said}");
    }
}

#[test]
fn data_that_is_not_there() {
    let run = Run::new();
    let missing = run.path("nowhere").display().to_string();
    assert_says(&run.set("training.dataset_path", &missing).error(), &[&missing]);
    let run = Run::new();
    let pattern = run.path("corpus/*.nothing").display().to_string();
    assert_says(&run.set("training.dataset_path", &pattern).error(), &["*.nothing"]);
}

#[test]
fn data_that_is_too_little_or_broken() {
    let run = Run::new();
    let empty = run.path("empty.txt");
    std::fs::write(&empty, "").unwrap();
    assert_says(&run.set("training.dataset_path", empty.display()).error(), &["token"]);
    let run = Run::new();
    let broken = run.path("broken.jsonl");
    std::fs::write(&broken, "{\"text\": \"one\"}\n{\"text\": \"two\n").unwrap();
    let run = run.set("training.dataset", "jsonl").set("training.dataset_path", broken.display());
    assert_says(&run.error(), &["broken.jsonl", "2"]);
    let run = Run::new();
    let other = run.path("other.jsonl");
    std::fs::write(&other, "{\"body\": \"one\"}\n").unwrap();
    let run = run.set("training.dataset", "jsonl").set("training.dataset_path", other.display());
    assert_says(&run.error(), &["text", "body"]);
}

#[test]
fn tokenizers_that_cannot_be_read() {
    let run = Run::new();
    let missing = run.path("tokenizer.json").display().to_string();
    assert_says(&run.set("model.tokenizer_path", &missing).error(), &["tokenizer.json"]);
    let run = Run::new();
    std::fs::write(run.path("tokenizer.json"), "{\"version\": \"1.0\", \"model\": ").unwrap();
    let path = run.path("tokenizer.json").display().to_string();
    assert_says(&run.set("model.tokenizer_path", path).error(), &["tokenizer.json"]);
    // A vocabulary that does not hold the tokenizer's tokens.
    assert_says(&Run::new().set("model.vocab_size", 100).error(), &["258", "100", "model.vocab_size"]);
}

#[test]
fn a_mesh_that_does_not_fit() {
    let said = Run::new().set("parallelism.data_parallel_replicate_degree", 3).nproc(4).error();
    assert_says(&said, &["3", "4", "data_parallel_replicate_degree"]);
    let said = Run::new().set("model.n_heads", 5).set("training.local_batch_size", 0).error();
    assert_says(&said, &["model.n_heads", "training.local_batch_size"]);
}

#[test]
fn a_rank_alone_gives_up_when_the_others_do_not_come() {
    let run = Run::new().set("comm.init_timeout_seconds", 4).set("comm.train_timeout_seconds", 4);
    let run = run.set("parallelism.data_parallel_replicate_degree", 2);
    for (rank, host) in [("0", "127.0.0.1"), ("1", "127.0.0.1")] {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = run.command();
        command.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        command.envs([("MASTER_ADDR", host.to_owned()), ("MASTER_PORT", port.to_string())]);
        let began = Instant::now();
        let output = finish(command.spawn().unwrap(), Duration::from_secs(60));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(began.elapsed() < Duration::from_secs(30), "rank {rank}: {:?}\n{said}", began.elapsed());
        assert_says(&said, &["error: "]);
    }
}

#[test]
fn a_console_that_goes_away_does_not_end_a_run() {
    let run = Run::new().set("metrics.log_freq", 1);
    let mut child = run.start();
    drop(child.stdout.take());
    let output = finish(child, Duration::from_secs(60));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(support::read_steps(&run.path("out/metrics.jsonl")).len(), 10);
}

#[test]
fn a_loss_that_is_not_finite_stops_every_rank_before_the_update() {
    let run = Run::new().set("optimizer.lr", 1e30).set("training.max_norm", 0).set("training.local_batch_size", 2);
    let said = run.set("parallelism.data_parallel_replicate_degree", 2).error();
    assert_says(&said, &["no parameter was updated", "samples"]);
}

#[test]
fn a_killed_process_ends_the_run() {
    let ranks = 3;
    let run = Run::new()
        .set("comm.backend", "processes")
        .set("parallelism.data_parallel_replicate_degree", ranks)
        .set("training.steps", 1_000_000)
        .set("metrics.log_freq", 1)
        .nproc(ranks);
    let mut child = run.start();
    // Once the first step is told of, all ranks are in the middle of training.
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.by_ref().map(Result::unwrap).find(|line| line.contains("step")).unwrap();
    let drained = std::thread::spawn(move || lines.count());
    let children = children_of(child.id());
    assert_eq!(children.len(), ranks, "{children:?}");
    let began = Instant::now();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(children[1]), nix::sys::signal::Signal::SIGKILL).unwrap();
    let output = finish(child, Duration::from_secs(30));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}\n{said}", began.elapsed());
    assert!(!output.status.success());
    assert_says(&said, &["SIGKILL"]);
    for child in children {
        assert!(!std::path::Path::new(&format!("/proc/{child}")).exists(), "process {child} is left over");
    }
    drained.join().unwrap();
}

/// The processes that a process started.
fn children_of(parent: u32) -> Vec<i32> {
    let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let mut children: Vec<i32> = match list {
        Ok(list) => list.split_whitespace().map(|id| id.parse().unwrap()).collect(),
        Err(_) => Vec::new(),
    };
    // The list holds the children of the main thread alone.
    for task in std::fs::read_dir(format!("/proc/{parent}/task")).unwrap() {
        let list = std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default();
        children.extend(list.split_whitespace().map(|id| id.parse::<i32>().unwrap()));
    }
    children.sort_unstable();
    children.dedup();
    children
}
