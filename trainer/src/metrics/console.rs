//! The console line, as TorchTitan has it.

use super::color::Color;
use super::record::{Record, Sink, StepMetrics};
use std::io;

/// Writes one line, which has no line end yet.
type Write = Box<dyn FnMut(&str) -> io::Result<()> + Send>;

/// Writes a line for the first step and for every `log_freq`-th; its rates are those of all steps since the line before.
pub struct Console {
    log_freq: u64,
    color: bool,
    write: Write,
    since: StepMetrics,
}

impl std::fmt::Debug for Console {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Console").field("log_freq", &self.log_freq).field("color", &self.color).finish()
    }
}

impl Console {
    /// A line every so many steps, colored or not, through this function.
    pub fn new(log_freq: u64, color: bool, write: impl FnMut(&str) -> io::Result<()> + Send + 'static) -> Self {
        Self { log_freq: log_freq.max(1), color, write: Box::new(write), since: StepMetrics::default() }
    }

    fn line(&self, record: &Record) -> String {
        let step = &record.step;
        let mut memory = format!("memory: {:5.2}GiB", step.memory.gib());
        if let Some(percent) = step.memory.percent() {
            memory.push_str(&format!("({percent:.2}%)"));
        }
        let mut parts = vec![
            Color::Red.paint(self.color, &format!("step: {:2}", step.step)),
            Color::Green.paint(self.color, &format!("loss: {:7.4}", step.loss)),
            Color::Yellow.paint(self.color, &format!("grad_norm: {:7.4}", step.grad_norm)),
            Color::Cyan.paint(self.color, &memory),
            Color::Blue.paint(self.color, &format!("tps: {}", thousands(record.tps))),
            Color::Magenta.paint(self.color, &format!("tflops: {:.2}", record.tflops)),
        ];
        if let Some(mfu) = record.mfu {
            let text = format!("mfu: {mfu:.2}% ({} attention)", record.cost.convention);
            parts.push(Color::Magenta.paint(self.color, &text));
        }
        parts.join("  ")
    }
}

/// A whole number in groups of three.
fn thousands(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string();
    }
    let digits = format!("{:.0}", value.abs());
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

impl Sink for Console {
    fn record(&mut self, record: &Record) -> io::Result<()> {
        self.since.tokens += record.step.tokens;
        self.since.seconds += record.step.seconds;
        if record.step.step != 1 && !record.step.step.is_multiple_of(self.log_freq) {
            return Ok(());
        }
        let since = std::mem::take(&mut self.since);
        let step = StepMetrics { tokens: since.tokens, seconds: since.seconds, ..record.step.clone() };
        let line = self.line(&Record::new(step, record.cost));
        (self.write)(&line)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::sections::MfuConvention;
    use crate::metrics::{Cost, Memory, Metrics};
    use std::sync::{Arc, Mutex};

    fn lines(log_freq: u64, color: bool, peak_tflops: Option<f64>, steps: &[StepMetrics]) -> Vec<String> {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let writer = lines.clone();
        let cost = Cost { flops_per_token: 71_585_280.0, convention: MfuConvention::Full, peak_tflops, ranks: 2 };
        let mut metrics = Metrics::new(cost).to(Console::new(log_freq, color, move |line| {
            writer.lock().unwrap().push(line.to_owned());
            Ok(())
        }));
        for step in steps {
            metrics.log(step).unwrap();
        }
        drop(metrics);
        Arc::into_inner(lines).unwrap().into_inner().unwrap()
    }

    fn step(step: u64) -> StepMetrics {
        let memory = Memory { bytes: 3 << 29, capacity: Some(6 << 30) };
        let (loss, grad_norm) = (7.6234, 1.45);
        StepMetrics { step, loss, grad_norm, tokens: 32_768 * step, seconds: 1.0, memory, ..StepMetrics::default() }
    }

    #[test]
    fn a_line_says_it_all() {
        let expected = "step:  1  loss:  7.6234  grad_norm:  1.4500  memory:  1.50GiB(25.00%)  tps: 16,384  tflops: 1.17  \
                        mfu: 0.12% (full attention)";
        assert_eq!(lines(10, false, Some(989.0), &[step(1)]), [expected]);
    }

    #[test]
    fn without_a_peak_there_is_no_mfu() {
        assert!(lines(10, false, None, &[step(1)])[0].ends_with("tflops: 1.17"));
    }

    #[test]
    fn only_lines_on_the_way_are_left_out_and_their_tokens_count() {
        let out = lines(2, false, None, &[step(1), step(2), step(3), step(4)]);
        assert_eq!(out.len(), 3);
        assert!(out[0].starts_with("step:  1") && out[1].starts_with("step:  2") && out[2].starts_with("step:  4"));
        // Steps 3 and 4: 7 * 32768 tokens in 2 seconds on 2 ranks.
        assert!(out[2].contains("tps: 57,344"), "{}", out[2]);
    }

    #[test]
    fn color_adds_nothing_but_color() {
        let colored = lines(1, true, Some(1.0), &[step(1)]).remove(0);
        let plain = lines(1, false, Some(1.0), &[step(1)]).remove(0);
        assert!(colored.contains("\x1b[31mstep:  1\x1b[39m"));
        let mut stripped = colored;
        for code in ["31", "32", "33", "34", "35", "36", "39"] {
            stripped = stripped.replace(&format!("\x1b[{code}m"), "");
        }
        assert_eq!(stripped, plain);
    }

    #[test]
    fn groups_of_three() {
        let grouped = [0.0, 999.4, 999.6, 1_234_567.0, f64::INFINITY].map(thousands);
        assert_eq!(grouped, ["0", "999", "1,000", "1,234,567", "inf"]);
    }
}
