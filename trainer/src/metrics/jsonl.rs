//! `metrics.jsonl`: one JSON object a line, one line a step.
//!
//! | name | what |
//! |---|---|
//! | `step` | the step, counted from 1 |
//! | `loss` | mean loss of a token of the global batch, in nats |
//! | `grad_norm` | norm of the global gradient, before clipping |
//! | `tps` | tokens a second on one device |
//! | `tflops` | TFLOP/s of one device |
//! | `mfu` | per cent of the device's peak, or null where that is not known |
//! | `mfu_convention` | how attention counts: `full` or `causal` |
//! | `memory` | bytes of the device, at its peak |
//! | `lr` | the learning rate of the step |
//! | `tokens` | tokens of the step, over all ranks |
//! | `seconds` | seconds that the step took |
//!
//! More names may follow. Numbers have as many digits as it takes to read them back exactly. JSON has no word for what is
//! not finite: that stands as one of the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.

use super::record::{Record, Sink};
use serde_json::{Map, Value};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Writes `metrics.jsonl`. Each line is in the file as soon as its step is done.
#[derive(Debug)]
pub struct JsonLines {
    file: File,
}

impl JsonLines {
    /// Begins `metrics.jsonl` in this folder, which is made where it is missing. A file of an earlier run is kept beside
    /// it, as `metrics.1.jsonl` or the next number that is free.
    ///
    /// # Errors
    /// When the folder or the file cannot be written.
    pub fn create(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let path = folder.join("metrics.jsonl");
        if path.try_exists()? {
            let mut number = 1_u32;
            let kept = loop {
                let kept = folder.join(format!("metrics.{number}.jsonl"));
                if !kept.try_exists()? {
                    break kept;
                }
                number += 1;
            };
            fs::rename(&path, kept)?;
        }
        Ok(Self { file: OpenOptions::new().append(true).create_new(true).open(path)? })
    }
}

impl Sink for JsonLines {
    fn record(&mut self, record: &Record) -> io::Result<()> {
        let step = &record.step;
        let mut object = Map::new();
        object.insert("step".into(), step.step.into());
        let numbers = [
            ("loss", step.loss),
            ("grad_norm", step.grad_norm),
            ("tps", record.tps),
            ("tflops", record.tflops),
            ("mfu", record.mfu.unwrap_or_default()),
            ("lr", step.lr),
            ("seconds", step.seconds),
        ];
        object.extend(numbers.map(|(name, value)| (name.to_owned(), number(value))));
        if record.mfu.is_none() {
            object.insert("mfu".into(), Value::Null);
        }
        object.insert("mfu_convention".into(), record.cost.convention.to_string().into());
        object.insert("memory".into(), step.memory.bytes.into());
        object.insert("tokens".into(), step.tokens.into());
        for (name, value) in &step.extras {
            object.entry(name.clone()).or_insert_with(|| number(*value));
        }
        let mut line = Value::Object(object).to_string();
        line.push('\n');
        // In one call: a reader never sees half a line.
        self.file.write_all(line.as_bytes())
    }
}

/// A number as JSON.
fn number(value: f64) -> Value {
    match serde_json::Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None if value.is_nan() => "NaN".into(),
        None if value > 0.0 => "Infinity".into(),
        None => "-Infinity".into(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::sections::MfuConvention;
    use crate::metrics::{Cost, Metrics, StepMetrics};

    fn metrics(folder: &Path, peak_tflops: Option<f64>) -> Metrics {
        let cost = Cost { flops_per_token: 1e9, convention: MfuConvention::Causal, peak_tflops, ranks: 1 };
        Metrics::new(cost).to(JsonLines::create(folder).unwrap())
    }

    fn lines(path: &Path) -> Vec<Value> {
        fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn numbers_come_back_exactly() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("deep/er");
        let mut metrics = metrics(&below, None);
        let (loss, grad_norm) = (1.0 / 3.0, 0.1 + 0.2);
        let memory = crate::metrics::Memory { bytes: (1 << 60) + 1, capacity: None };
        let extras = vec![("validation_loss".to_owned(), 2.5), ("loss".to_owned(), 9.0)];
        let step = StepMetrics { step: 1, loss, grad_norm, lr: 1e-300, seconds: 1.0, memory, extras, tokens: 7 };
        metrics.log(&step).unwrap();
        let line = lines(&below.join("metrics.jsonl")).remove(0);
        assert_eq!(line["loss"].as_f64().unwrap().to_bits(), loss.to_bits());
        assert_eq!(line["grad_norm"].as_f64().unwrap().to_bits(), grad_norm.to_bits());
        assert_eq!(line["lr"].as_f64(), Some(1e-300));
        assert_eq!(line["memory"].as_u64(), Some((1 << 60) + 1));
        assert_eq!(line["validation_loss"].as_f64(), Some(2.5));
        assert_eq!(line["tps"].as_f64(), Some(7.0));
        assert!(line["mfu"].is_null());
        assert_eq!(line["mfu_convention"], "causal");
    }

    #[test]
    fn what_is_not_finite_is_a_word() {
        let folder = tempfile::tempdir().unwrap();
        let mut metrics = metrics(folder.path(), Some(1.0));
        let step = StepMetrics {
            loss: f64::NAN,
            grad_norm: f64::INFINITY,
            lr: f64::NEG_INFINITY,
            seconds: 1.0,
            ..StepMetrics::default()
        };
        metrics.log(&step).unwrap();
        let line = lines(&folder.path().join("metrics.jsonl")).remove(0);
        assert_eq!(
            (&line["loss"], &line["grad_norm"], &line["lr"]),
            (&"NaN".into(), &"Infinity".into(), &"-Infinity".into())
        );
        assert_eq!(line["mfu"].as_f64(), Some(0.0));
    }

    #[test]
    fn an_earlier_run_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        for step in 1..=3 {
            metrics(folder.path(), None).log(&StepMetrics { step, ..StepMetrics::default() }).unwrap();
        }
        let step = |name: &str| lines(&folder.path().join(name))[0]["step"].as_u64().unwrap();
        assert_eq!((step("metrics.1.jsonl"), step("metrics.2.jsonl"), step("metrics.jsonl")), (1, 2, 3));
    }
}
