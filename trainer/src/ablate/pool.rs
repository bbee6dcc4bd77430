//! Runs cells as child processes, as many at a time as fit, and sees to it that none is left behind.

use super::cell::Cell;
use super::record::{self, Identity};
use crate::config::Flag;
use crate::launch::parent::LAUNCHED;
use crate::plan::Backend;
use anyhow::Context as _;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a run may take to end once it was asked to; more than its own ranks have.
const GRACE: Duration = Duration::from_secs(8);

/// What a process takes beside its parameters: libtorch, measured at 0.4 GiB for the smallest model.
const PROCESS_BYTES: u64 = 1 << 29;

/// How many of a cell's last lines are told when it fails.
const LAST_LINES: usize = 6;

/// Where and how cells are run.
#[derive(Debug)]
pub(crate) struct Options {
    /// The program that trains.
    pub(crate) program: PathBuf,
    /// The folder of the results.
    pub(crate) out: PathBuf,
    /// Cells at a time; `None`: as many ranks as there are cores, or one cell.
    pub(crate) jobs: Option<usize>,
    /// What one run may take.
    pub(crate) timeout: Duration,
}

/// What became of a cell.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ran {
    /// It ended well, now or earlier.
    Well { took: Duration, earlier: bool },
    /// It did not: why, and the last lines of its output.
    Failed { why: String, lines: String },
    /// It is not to be run.
    Left,
    /// It was not run yet.
    Missing,
}

/// All cells, or as many as there were when a signal came.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// What became of each cell.
    All(Vec<Ran>),
    /// Told to end by this signal.
    Interrupted(i32),
}

/// Runs all cells that are not finished yet. `told` is called once for each cell, with its index, as it ends.
pub(crate) fn run(
    cells: &[Cell],
    base: &str,
    options: &Options,
    mut told: impl FnMut(usize, &Ran),
) -> anyhow::Result<Outcome> {
    let program = record::program_identity(&options.program).context("cannot look at this program's own file")?;
    fs::create_dir_all(&options.out).with_context(|| format!("cannot make {}", options.out.display()))?;
    let _lock = lock(&options.out)?;
    let base_file = options.out.join("base.toml");
    fs::write(&base_file, base).with_context(|| format!("cannot write {}", base_file.display()))?;
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot listen for signals")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);

    let mut outcome: Vec<Option<Ran>> = vec![None; cells.len()];
    let mut waiting = VecDeque::new();
    for (index, cell) in cells.iter().enumerate() {
        let identity = Identity::new(&program, base, cell);
        let ran = match record::finished(&options.out.join(cell.folder()), &identity) {
            _ if cell.illegal.is_some() => Some(Ran::Left),
            Some(took) => Some(Ran::Well { took, earlier: true }),
            None => None,
        };
        match &ran {
            Some(ran) => told(index, ran),
            None => waiting.push_back((index, identity)),
        }
        outcome[index] = ran;
    }
    let mut running: Vec<Running<'_>> = Vec::new();
    while !(waiting.is_empty() && running.is_empty()) {
        if let Some(signal) = signals.pending().next() {
            end_all(&mut running, &mut signals);
            return Ok(Outcome::Interrupted(signal));
        }
        while let Some((index, _)) = waiting.front() {
            let cell = &cells[*index];
            let busy: usize = running.iter().map(|other| other.cell.ranks().min(cores)).sum();
            let fits = match options.jobs {
                Some(jobs) => running.len() < jobs,
                None => running.is_empty() || busy + cell.ranks().min(cores) <= cores,
            };
            if !fits || !(running.is_empty() || has_memory(cell)) {
                break;
            }
            let Some((index, identity)) = waiting.pop_front() else { break };
            running.push(Running::start(index, cell, identity, options, &base_file)?);
        }
        let mut still = Vec::new();
        for mut one in running {
            match one.look(options, &base_file)? {
                None => still.push(one),
                Some(ran) => {
                    told(one.index, &ran);
                    outcome[one.index] = Some(ran);
                }
            }
        }
        running = still;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(Outcome::All(outcome.into_iter().flatten().collect()))
}

/// The words after the program's name that run this.
pub(super) fn words(base: &Path, settings: &[Flag], folder: &Path) -> Vec<String> {
    let mut words = vec!["train".to_owned(), base.display().to_string()];
    words.extend(settings.iter().map(|flag| flag.text.clone()));
    words.push(format!("--job.dump_folder={}", folder.display()));
    words
}

/// Two of us in one folder would tear each other's cells.
fn lock(out: &Path) -> anyhow::Result<nix::fcntl::Flock<File>> {
    let file = OpenOptions::new().create(true).append(true).open(out.join("lock"));
    let file = file.with_context(|| format!("cannot write in {}", out.display()))?;
    nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock)
        .map_err(|_| anyhow::anyhow!("another `ferrotitan ablate` is at work in {}", out.display()))
}

/// Whether the machine has the memory that a cell takes, by a rough count: each process, and for each copy of the model
/// its parameters, their gradients and the optimizer's two moments.
fn has_memory(cell: &Cell) -> bool {
    let needed = cell.plans.iter().map(|plan| {
        let degrees = plan.degrees;
        let processes = if plan.comm.backend == Backend::Processes { degrees.world_size() } else { 1 };
        let size = plan.precision.parameters.kind().elt_size_in_bytes();
        processes as u64 * PROCESS_BYTES + (plan.model.parameters() * 4 * size * degrees.dp_replicate) as u64
    });
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.is_none_or(|kib| kib * 1024 >= needed.max().unwrap_or(0))
}

/// A cell that is being run.
struct Running<'a> {
    index: usize,
    cell: &'a Cell,
    identity: Option<Identity>,
    folder: PathBuf,
    /// Which of its runs this is.
    run: usize,
    child: Child,
    began: Instant,
    run_began: Instant,
    /// When it was asked to end for taking too long.
    asked: Option<Instant>,
}

impl<'a> Running<'a> {
    /// Starts the first run of a cell, in an empty folder.
    fn start(index: usize, cell: &'a Cell, identity: Identity, options: &Options, base: &Path) -> anyhow::Result<Self> {
        let folder = options.out.join(cell.folder());
        // What an earlier attempt left is torn, or of other settings.
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot empty {}", folder.display()));
            }
            _ => {}
        }
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let child = start(cell, 0, &folder, options, base)?;
        let now = Instant::now();
        let identity = Some(identity);
        Ok(Self { index, cell, identity, folder, run: 0, child, began: now, run_began: now, asked: None })
    }

    /// What became of it, once it has ended; its next run is started here.
    fn look(&mut self, options: &Options, base: &Path) -> anyhow::Result<Option<Ran>> {
        let Some(status) = self.child.try_wait().context("cannot watch a run")? else {
            match self.asked {
                None if self.run_began.elapsed() > options.timeout => {
                    self.signal(Signal::SIGTERM);
                    self.asked = Some(Instant::now());
                }
                Some(asked) if asked.elapsed() > GRACE => self.signal(Signal::SIGKILL),
                _ => {}
            }
            return Ok(None);
        };
        let which = match self.cell.runs.len() {
            1 => String::new(),
            runs => format!(" in run {} of {runs}", self.run + 1),
        };
        if self.asked.is_some() {
            let why = format!("took longer than {} s{which}", options.timeout.as_secs());
            return Ok(Some(Ran::Failed { why, lines: last_lines(&self.folder) }));
        }
        if !status.success() {
            let why = format!("ended with {status}{which}");
            return Ok(Some(Ran::Failed { why, lines: last_lines(&self.folder) }));
        }
        if self.run + 1 < self.cell.runs.len() {
            self.run += 1;
            self.child = start(self.cell, self.run, &self.folder, options, base)?;
            self.run_began = Instant::now();
            return Ok(None);
        }
        let took = self.began.elapsed();
        if let Some(identity) = self.identity.take() {
            record::finish(&self.folder, identity, took)
                .with_context(|| format!("cannot write in {}", self.folder.display()))?;
        }
        Ok(Some(Ran::Well { took, earlier: false }))
    }

    fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // One that ended just now is no mistake.
            let _ = killpg(Pid::from_raw(pid), signal);
        }
    }
}

impl Drop for Running<'_> {
    /// However this ends, no run is left behind.
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

fn start(cell: &Cell, run: usize, folder: &Path, options: &Options, base: &Path) -> anyhow::Result<Child> {
    let output = OpenOptions::new().create(true).append(true).open(folder.join("output.txt"));
    let output = output.with_context(|| format!("cannot write in {}", folder.display()))?;
    let mut command = Command::new(&options.program);
    command
        .args(words(base, &cell.runs[run], folder))
        // Our end of it tells the run that we live.
        .env(LAUNCHED, "1")
        .env("NO_COLOR", "1")
        .stdin(Stdio::piped())
        .stdout(output.try_clone().context("cannot share a file")?)
        .stderr(output)
        // A group of its own: the terminal's Ctrl-C comes from us alone.
        .process_group(0);
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(name);
    }
    // A rank computes on one core in every cell, whatever runs beside it, so that their times can be compared.
    if std::env::var_os("OMP_NUM_THREADS").is_none() {
        command.env("OMP_NUM_THREADS", "1");
    }
    command.spawn().with_context(|| format!("cannot start {}", options.program.display()))
}

/// Asks all to end, and ends those that do not; who asks us twice does not want to wait.
fn end_all(running: &mut [Running<'_>], signals: &mut Signals) {
    running.iter().for_each(|one| one.signal(Signal::SIGTERM));
    let asked = Instant::now();
    while running.iter_mut().any(|one| matches!(one.child.try_wait(), Ok(None))) {
        if asked.elapsed() > GRACE || signals.pending().next().is_some() {
            running.iter().for_each(|one| one.signal(Signal::SIGKILL));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The end of a cell's output.
fn last_lines(folder: &Path) -> String {
    let text = fs::read(folder.join("output.txt")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let lines = lines[lines.len().saturating_sub(LAST_LINES)..].iter();
    // A line has no end that anybody wants to read.
    lines.map(|line| line.chars().take(300).collect::<String>()).collect::<Vec<_>>().join("\n")
}
