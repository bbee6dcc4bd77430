//! Runs of the binary on a small corpus of their own.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "shared by test files, each of which uses a part")]
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// What `metrics.jsonl` says of a step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub step: u64,
    pub loss: f64,
    pub grad_norm: f64,
}

/// A run of the binary that is being put together.
pub struct Run {
    folder: TempDir,
    arguments: Vec<String>,
}

/// No test run takes longer; whatever does is ended.
const LIMIT: Duration = Duration::from_secs(120);

impl Run {
    /// Ten steps of a tiny model on a tiny corpus.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let corpus = folder.path().join("corpus");
        std::fs::create_dir(&corpus).unwrap();
        for file in 0..40 {
            // Documents shorter and longer than a sequence.
            let line = |n: usize| format!("{file} + {n} = {}\n", file + n);
            let text: String = (0..file % 9 + 1).map(line).collect();
            std::fs::write(corpus.join(format!("{file}.txt")), text).unwrap();
        }
        let run = Self { arguments: vec!["train".into()], folder };
        let (out, corpus) = (run.path("out"), corpus.display().to_string());
        run.set("job.dump_folder", out.display())
            .set("training.dataset", "text")
            .set("training.dataset_path", corpus)
            .set("training.steps", 10)
            .set("training.local_batch_size", 2)
            .set("training.global_batch_size", -1)
            .set("training.seq_len", 32)
            .set("lr_scheduler.warmup_steps", 2)
            .set("validation.enable", "false")
            .set("model.dim", 32)
            .set("model.n_layers", 2)
            .set("model.n_heads", 4)
            .set("model.n_kv_heads", 2)
            .set("model.ffn_dim", 48)
    }

    /// A path in the run's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Sets a key of the config.
    pub fn set(mut self, key: &str, value: impl std::fmt::Display) -> Self {
        self.arguments.push(format!("--{key}={value}"));
        self
    }

    /// Sets the number of ranks.
    pub fn nproc(mut self, ranks: usize) -> Self {
        self.arguments.push(format!("--nproc={ranks}"));
        self
    }

    /// The command that it is.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotitan"));
        command.args(&self.arguments).env("XDG_CACHE_HOME", self.path("cache")).env_remove("RANK");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts it.
    pub fn start(&self) -> Child {
        self.command().spawn().unwrap()
    }

    /// Runs it to its end.
    pub fn output(&self) -> Output {
        finish(self.start(), LIMIT)
    }

    /// Runs it to a good end, and reads what it measured.
    pub fn steps(&self) -> Vec<Step> {
        let output = self.output();
        assert!(output.status.success(), "{:?}\n{}", self.arguments, String::from_utf8_lossy(&output.stderr));
        read_steps(&self.path("out/metrics.jsonl"))
    }

    /// Runs it to a bad end, and gives what it says.
    pub fn error(&self) -> String {
        let output = self.output();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{:?}\n{said}", self.arguments);
        assert!(!said.contains("panicked"), "{said}");
        said
    }
}

/// Reads `metrics.jsonl`.
pub fn read_steps(path: &Path) -> Vec<Step> {
    let text = std::fs::read_to_string(path).unwrap();
    let step = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        let number = |name: &str| value[name].as_f64().unwrap_or_else(|| panic!("{name} in {line}"));
        for name in ["tps", "tflops", "memory", "lr"] {
            number(name);
        }
        assert!(value.get("mfu").is_some(), "{line}");
        Step { step: number("step") as u64, loss: number("loss"), grad_norm: number("grad_norm") }
    };
    text.lines().map(step).collect()
}

/// Waits for a process that we started, and ends it when it takes too long.
pub fn finish(mut child: Child, limit: Duration) -> Output {
    let began = Instant::now();
    // Read as it comes: a full pipe would stop the process.
    let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > limit {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("still running after {limit:?}: {}", String::from_utf8_lossy(&err.join().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    Output { status, stdout: out.join().unwrap(), stderr: err.join().unwrap() }
}

fn drain(pipe: Option<impl std::io::Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}
