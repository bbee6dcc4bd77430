//! A matrix of runs of a tiny model on a tiny corpus.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "shared by test files, each of which uses a part")]
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

pub struct Matrix {
    folder: TempDir,
}

const BASE: &str = r#"
[base]
model = { dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 48 }
training.dataset = "text"
training.dataset_path = "corpus"
training.seq_len = 32
training.local_batch_size = 2
training.global_batch_size = 4
training.steps = 3
training.dtype = "float64"
training.mixed_precision_param = "float64"
training.mixed_precision_reduce = "float64"
lr_scheduler.warmup_steps = 2
lr_scheduler.total_steps = 6
validation.enable = false
"#;

impl Matrix {
    /// A matrix of this text, over a base of a tiny model.
    pub fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("corpus")).unwrap();
        for file in 0..40 {
            let text: String = (0..file % 9 + 1).map(|n| format!("{file} + {n} = {}\n", file + n)).collect();
            std::fs::write(folder.path().join(format!("corpus/{file}.txt")), text).unwrap();
        }
        let matrix = Self { folder };
        std::fs::write(matrix.file(), format!("{text}\n{BASE}")).unwrap();
        matrix
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("matrix.toml")
    }

    pub fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Changes its text.
    pub fn rewrite(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(self.file()).unwrap();
        assert!(text.contains(from));
        std::fs::write(self.file(), text.replace(from, to)).unwrap();
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotitan"));
        command.arg("ablate").arg(self.file()).arg("--out").arg(self.out()).args(words);
        command.env("XDG_CACHE_HOME", self.folder.path().join("cache")).env_remove("CLICOLOR_FORCE");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Exit code, standard output and standard error.
    pub fn run(&self, words: &[&str]) -> (i32, String, String) {
        let output = self.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    pub fn results(&self) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(self.out().join("results.json")).unwrap()).unwrap()
    }
}
