//! `ferrotitan doctor`: what this build runs on, what is missing, and what to do about it.

mod libtorch;
mod machine;

use crate::metrics::{Color, wants_color};
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

/// How things are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// As they should be.
    Good,
    /// Something is missing that a training run does not need.
    Note,
    /// A training run would fail.
    Blocks,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What it is about.
    pub topic: &'static str,
    /// How things are.
    pub state: State,
    /// What was found.
    pub text: String,
    /// What would mend it.
    pub mend: Option<String>,
}

impl Finding {
    fn good(topic: &'static str, text: impl Into<String>) -> Self {
        Self { topic, state: State::Good, text: text.into(), mend: None }
    }

    fn note(topic: &'static str, text: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { topic, state: State::Note, text: text.into(), mend: Some(mend.into()) }
    }

    fn blocks(topic: &'static str, text: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { topic, state: State::Blocks, text: text.into(), mend: Some(mend.into()) }
    }
}

/// Looks at everything.
pub fn examine() -> Vec<Finding> {
    let mut findings = libtorch::examine();
    findings.extend(machine::examine());
    findings
}

/// Prints what was found; fails when something would keep a training run from working.
pub fn run() -> ExitCode {
    let findings = examine();
    let mut out = io::stdout().lock();
    let _ = out.write_all(render(&findings, wants_color(io::stdout().is_terminal())).as_bytes());
    let blocked = findings.iter().any(|finding| finding.state == State::Blocks);
    if blocked { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn render(findings: &[Finding], color: bool) -> String {
    let mut text = String::new();
    for finding in findings {
        let (word, paint) = match finding.state {
            State::Good => ("good", Color::Green),
            State::Note => ("note", Color::Yellow),
            State::Blocks => ("FAIL", Color::Red),
        };
        text.push_str(&format!("{}  {:<10} {}\n", paint.paint(color, word), finding.topic, finding.text));
        if let Some(mend) = &finding.mend {
            text.push_str(&format!("{:17}to mend it: {mend}\n", ""));
        }
    }
    let blocking = findings.iter().filter(|finding| finding.state == State::Blocks).count();
    text.push_str(&match blocking {
        0 => "a training run can start\n".to_owned(),
        1 => "1 fault keeps a training run from starting\n".to_owned(),
        n => format!("{n} faults keep a training run from starting\n"),
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_to_do() {
        let findings = [Finding::good("memory", "plenty"), Finding::blocks("torch", "none", "fetch it")];
        assert_eq!(
            render(&findings, false),
            "good  memory     plenty\nFAIL  torch      none\n                 to mend it: fetch it\n1 fault keeps a training \
             run from starting\n"
        );
        assert!(render(&findings[..1], true).contains("\x1b[32mgood\x1b[39m"));
    }

    #[test]
    fn this_machine_can_train() {
        // Whatever runs this test has built, linked and loaded libtorch.
        let blocking: Vec<_> = examine().into_iter().filter(|finding| finding.state == State::Blocks).collect();
        assert_eq!(blocking, []);
    }
}
