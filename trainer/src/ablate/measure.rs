//! What the runs of a cell wrote.

use crate::metrics::Summary;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Step {
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    pub(super) validation_loss: Option<f64>,
    pub(super) seconds: f64,
    pub(super) tokens: f64,
}

/// A cell's steps, and the summary of its last run.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) steps: BTreeMap<u64, Step>,
    pub(super) summary: Summary,
}

impl Measured {
    /// Reads a cell of so many steps.
    ///
    /// # Errors
    /// In words: when something is missing or torn, or a further run began again instead of going on.
    pub(super) fn read(folder: &Path, expected: u64) -> Result<Self, String> {
        let mut steps = BTreeMap::new();
        for file in files(folder)? {
            let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
            for line in text.lines() {
                let (number, step) = step(line).ok_or_else(|| format!("{}: a torn line", file.display()))?;
                if number == 1 && !steps.is_empty() {
                    return Err("a further run began with step 1 again: it loaded no checkpoint".to_owned());
                }
                steps.insert(number, step);
            }
        }
        if let Some(missing) = (1..=expected).find(|number| !steps.contains_key(number)) {
            return Err(format!("step {missing} of {expected} is missing in metrics.jsonl"));
        }
        let summary = Summary::read(folder).map_err(|error| format!("summary.json: {error}"))?;
        Ok(Self { steps, summary })
    }

    /// Tokens a second of the whole mesh: the middle one of the steps, without the first, which sets things up.
    pub(super) fn tokens_per_second(&self) -> f64 {
        let skip = usize::from(self.steps.len() > 1);
        let mut rates: Vec<f64> = self.steps.values().skip(skip).map(|step| step.tokens / step.seconds).collect();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// `metrics.1.jsonl` and so on are of earlier runs, `metrics.jsonl` is of the last.
fn files(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<(u64, PathBuf)> = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name == "metrics.jsonl" {
            files.push((u64::MAX, path));
        } else if let Some(number) = name.strip_prefix("metrics.").and_then(|rest| rest.strip_suffix(".jsonl"))
            && let Ok(number) = number.parse()
        {
            files.push((number, path));
        }
    }
    files.sort();
    Ok(files.into_iter().map(|(_, path)| path).collect())
}

fn step(line: &str) -> Option<(u64, Step)> {
    let value: Value = serde_json::from_str(line).ok()?;
    let number = |name: &str| match value.get(name)? {
        Value::String(word) => word.parse().ok(),
        value => value.as_f64(),
    };
    let step = Step {
        loss: number("loss")?,
        grad_norm: number("grad_norm")?,
        validation_loss: number("validation_loss"),
        seconds: number("seconds")?,
        tokens: number("tokens")?,
    };
    Some((value.get("step")?.as_u64()?, step))
}
