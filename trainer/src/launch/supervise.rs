//! Starts the ranks, and sees to it that they end together.

use super::output::forward;
use super::ranks::{Spec, free_port};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How the ranks ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of them well.
    Success,
    /// One died, and the others were ended for it.
    Died {
        /// The first that died.
        rank: usize,
        /// Of what.
        death: Death,
    },
    /// The launcher was told to end by this signal, and ended them.
    Interrupted(i32),
}

/// How the ranks of this machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// All of them together.
    pub outcome: Outcome,
    /// Each of them, in their order.
    pub ranks: Vec<RankEnd>,
}

/// How one rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankEnd {
    /// Which one.
    pub rank: usize,
    /// What it died of; `None`: it ended well.
    pub death: Option<Death>,
    /// Whether it had been told to end.
    pub told: bool,
}

/// What a rank died of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// It ended with this code.
    Exit(i32),
    /// A signal killed it.
    Signal(i32),
}

impl Death {
    /// What this status means, `None` for success.
    fn of(status: ExitStatus) -> Option<Self> {
        match (status.code(), status.signal()) {
            (Some(0), _) => None,
            (Some(code), _) => Some(Self::Exit(code)),
            (None, signal) => Some(Self::Signal(signal.unwrap_or_default())),
        }
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exited with code {code}"),
            Self::Signal(number) => match Signal::try_from(*number) {
                Ok(signal) => write!(f, "was killed by {signal}"),
                Err(_) => write!(f, "was killed by signal {number}"),
            },
        }
    }
}

/// Ranks that could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// One of them.
    #[error("cannot start rank {rank} ({program}): {source}")]
    Start {
        /// Which one.
        rank: usize,
        /// Its program.
        program: String,
        /// What the system says.
        source: io::Error,
    },
    /// Without a port there is no place to meet.
    #[error("cannot find a free port: {source}")]
    Port {
        /// What the system says.
        source: io::Error,
    },
    /// Without signal handlers, Ctrl-C would leave the ranks behind.
    #[error("cannot listen for signals: {source}")]
    Signals {
        /// What the system says.
        source: io::Error,
    },
    /// Only a single machine can choose its port.
    #[error("several machines need --master-port: the port at which rank 0 listens")]
    NoPort,
}

/// Starts the ranks of this machine and waits for them all.
///
/// When one dies, or when SIGINT, SIGTERM or SIGHUP arrives, the others are asked to end with SIGTERM (or with that
/// signal), and killed when the grace is over. When it returns, none of them is left.
///
/// # Errors
/// When a rank cannot be started; then those that were are ended.
pub fn launch(spec: &Spec) -> Result<Ended, LaunchError> {
    let port = match spec.machines.master_port {
        Some(port) => port,
        None if spec.machines.count > 1 => return Err(LaunchError::NoPort),
        None => free_port().map_err(|source| LaunchError::Port { source })?,
    };
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|source| LaunchError::Signals { source })?;
    let mut ranks = Ranks { children: Vec::new(), readers: Vec::new(), first: spec.first_rank() };
    for local_rank in 0..spec.ranks {
        let rank = ranks.first + local_rank;
        let mut child = spec.start(local_rank, port).map_err(|source| {
            ranks.signal(Signal::SIGKILL);
            LaunchError::Start { rank, program: spec.program.display().to_string(), source }
        })?;
        if let Some(stdout) = child.stdout.take() {
            ranks.readers.push(forward(stdout, rank, spec.prefix, spec.stdout.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            ranks.readers.push(forward(stderr, rank, spec.prefix, spec.stderr.clone()));
        }
        ranks.children.push(Running { child, status: None, told: false });
    }

    let mut outcome = Outcome::Success;
    let mut deadline: Option<Instant> = None;
    while ranks.any_alive() {
        let mut stop = None;
        for signal in signals.pending() {
            // Who asks twice does not want to wait.
            stop = if deadline.is_some() { Some(Signal::SIGKILL) } else { Signal::try_from(signal).ok() };
            if outcome == Outcome::Success {
                outcome = Outcome::Interrupted(signal);
            }
        }
        if let Some((rank, death)) = ranks.reap()
            && outcome == Outcome::Success
        {
            outcome = Outcome::Died { rank, death };
            stop = Some(Signal::SIGTERM);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            stop = Some(Signal::SIGKILL);
        }
        if let Some(signal) = stop {
            ranks.signal(signal);
            deadline.get_or_insert_with(|| Instant::now() + spec.grace);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    ranks.finish_output();
    Ok(Ended { outcome, ranks: ranks.ends() })
}

/// A rank, and how it ended if it has.
struct Running {
    child: Child,
    status: Option<ExitStatus>,
    /// Whether a signal of ours came before its end.
    told: bool,
}

struct Ranks {
    children: Vec<Running>,
    readers: Vec<JoinHandle<()>>,
    first: usize,
}

impl Ranks {
    fn any_alive(&self) -> bool {
        self.children.iter().any(|rank| rank.status.is_none())
    }

    /// Collects those that ended since the last look. Of several that died, one that was killed by a signal is the first:
    /// others exit when they lose it.
    fn reap(&mut self) -> Option<(usize, Death)> {
        let mut deaths = Vec::new();
        for (local_rank, rank) in self.children.iter_mut().enumerate() {
            if rank.status.is_none() {
                rank.status = rank.child.try_wait().ok().flatten();
                if let Some(death) = rank.status.and_then(Death::of) {
                    deaths.push((self.first + local_rank, death));
                }
            }
        }
        let killed = deaths.iter().find(|(_, death)| matches!(death, Death::Signal(_)));
        killed.or(deaths.first()).copied()
    }

    /// Sends a signal to all that are alive, and to what they started.
    fn signal(&mut self, signal: Signal) {
        for rank in &mut self.children {
            if let (None, Ok(pid)) = (rank.status, i32::try_from(rank.child.id())) {
                rank.told = true;
                // One that ended just now is no mistake.
                let _ = killpg(Pid::from_raw(pid), signal);
            }
        }
    }

    fn ends(&self) -> Vec<RankEnd> {
        let end = |(local_rank, rank): (usize, &Running)| RankEnd {
            rank: self.first + local_rank,
            death: rank.status.and_then(Death::of),
            told: rank.told,
        };
        self.children.iter().enumerate().map(end).collect()
    }

    /// Lets the last lines through. What a rank started may have outlived it and hold its output open: that is not
    /// waited for.
    fn finish_output(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.readers.iter().any(|reader| !reader.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Ranks {
    /// However this ends, no rank is left behind.
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        for rank in &mut self.children {
            if rank.status.is_none() {
                let _ = rank.child.wait();
            }
        }
    }
}
