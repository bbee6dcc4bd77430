//! Ranks that die, and launchers that are told to end.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use ferrotitan_trainer::launch::{
    Death, Ended, LaunchError, Machines, Outcome, Prefix, RankEnd, Sink, Spec, follow_parent, launch,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Shared {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Ranks that run this script. `sh` ends after a minute at most, whatever the test does.
fn spec(ranks: usize, script: &str) -> (Spec, Shared, Shared) {
    let (out, err) = (Shared::default(), Shared::default());
    let spec = Spec {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        ranks,
        machines: Machines::default(),
        grace: Duration::from_millis(300),
        prefix: Prefix { color: false },
        stdout: Sink::new(out.clone()),
        stderr: Sink::new(err.clone()),
    };
    (spec, out, err)
}

fn timed(spec: &Spec) -> (Outcome, Duration) {
    let start = Instant::now();
    (launch(spec).unwrap().outcome, start.elapsed())
}

#[test]
fn each_rank_knows_its_place_and_its_lines_are_prefixed() {
    let script =
        "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR; echo $MASTER_PORT $OMP_NUM_THREADS >&2";
    let (spec, out, err) = spec(3, script);
    assert_eq!(launch(&spec).unwrap().outcome, Outcome::Success);
    let text = out.text();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 0] 0 0 3 3 127.0.0.1", "[rank 1] 1 1 3 3 127.0.0.1", "[rank 2] 2 2 3 3 127.0.0.1"]);
    let text = err.text();
    let mut rest: Vec<&str> = text.lines().map(|line| line.split_once("] ").unwrap().1).collect();
    rest.dedup();
    assert_eq!(rest.len(), 1, "all ranks have one port and as many threads: {text}");
    let numbers: Vec<u32> = rest[0].split(' ').map(|number| number.parse().unwrap()).collect();
    assert!(numbers[0] > 1023 && numbers[1] >= 1);
}

#[test]
fn the_second_machine_counts_on() {
    let (mut spec, out, _) = spec(2, "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT");
    spec.machines = Machines { count: 2, index: 1, master_addr: "node0".into(), master_port: None };
    assert!(matches!(launch(&spec), Err(LaunchError::NoPort)));
    spec.machines.master_port = Some(29500);
    assert_eq!(launch(&spec).unwrap().outcome, Outcome::Success);
    let text = out.text();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 2] 2 0 4 node0:29500", "[rank 3] 3 1 4 node0:29500"]);
}

#[test]
fn one_exit_ends_the_others() {
    let (spec, ..) = spec(3, "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 60");
    let (outcome, took) = timed(&spec);
    assert_eq!(outcome, Outcome::Died { rank: 1, death: Death::Exit(7) });
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn one_kill_ends_the_others_and_is_named() {
    let (spec, ..) = spec(3, "if [ $RANK = 2 ]; then kill -KILL $$; fi; exec sleep 60");
    let start = Instant::now();
    let Ended { outcome, ranks } = launch(&spec).unwrap();
    let took = start.elapsed();
    let told = |rank| RankEnd { rank, death: Some(Death::Signal(15)), told: true };
    assert_eq!(ranks, [told(0), told(1), RankEnd { rank: 2, death: Some(Death::Signal(9)), told: false }]);
    let Outcome::Died { rank, death } = outcome else { panic!("{outcome:?}") };
    assert_eq!(format!("rank {rank} {death}"), "rank 2 was killed by SIGKILL");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn who_does_not_end_is_killed_with_all_that_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let script = format!(
        "if [ $RANK = 0 ]; then while [ ! -s {0} ]; do sleep 0.02; done; exit 1; fi; trap '' TERM; sleep 60 & \
         echo $! > {0}.part; mv {0}.part {0}; wait; sleep 60",
        file.display()
    );
    let (spec, ..) = spec(2, &script);
    let (outcome, took) = timed(&spec);
    assert_eq!(outcome, Outcome::Died { rank: 0, death: Death::Exit(1) });
    assert!(took >= spec.grace && took < Duration::from_secs(15), "{took:?}");
    let pid: i32 = std::fs::read_to_string(file).unwrap().trim().parse().unwrap();
    assert!(gone(pid, Duration::from_secs(10)), "the sleep of rank 1 outlived it");
}

#[test]
fn a_rank_that_ends_early_and_well_is_no_reason_to_end_the_others() {
    let (spec, out, _) = spec(2, "if [ $RANK = 0 ]; then exit 0; fi; sleep 0.5; echo late");
    assert_eq!(launch(&spec).unwrap().outcome, Outcome::Success);
    assert_eq!(out.text(), "[rank 1] late\n");
}

#[test]
fn a_program_that_is_not_there() {
    let (mut spec, ..) = spec(2, "");
    spec.program = "/no/such/program".into();
    let message = launch(&spec).unwrap_err().to_string();
    assert!(message.contains("cannot start rank 0 (/no/such/program)"), "{message}");
}

#[test]
fn all_of_a_long_output_comes_through() {
    let (spec, out, _) = spec(2, "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done");
    assert_eq!(launch(&spec).unwrap().outcome, Outcome::Success);
    assert_eq!(out.text().lines().count(), 4000);
    assert!(out.text().lines().all(|line| line.starts_with("[rank ") && line.contains("] line ")));
}

// The two tests below need a launcher that is a process of its own: this test binary, asked for `launcher`.

/// Starts two ranks of `rank`, each of which prints its process id and sleeps.
#[test]
#[ignore = "no test of its own: the tests below start it as a process"]
fn launcher() {
    let spec = Spec {
        program: std::env::current_exe().unwrap(),
        args: ["--exact", "rank", "--ignored", "--nocapture"].map(Into::into).to_vec(),
        ranks: 2,
        machines: Machines::default(),
        grace: Duration::from_secs(2),
        prefix: Prefix { color: false },
        stdout: Sink::new(std::io::stdout()),
        stderr: Sink::new(std::io::stderr()),
    };
    let code = match launch(&spec).unwrap().outcome {
        Outcome::Interrupted(signal) => 128 + signal,
        _ => 0,
    };
    std::process::exit(code);
}

#[test]
#[ignore = "no test of its own: `launcher` starts it as a rank"]
fn rank() {
    follow_parent();
    println!("\npid={}", std::process::id());
    std::thread::sleep(Duration::from_secs(60));
}

struct Launcher {
    child: Child,
    ranks: Vec<i32>,
    _out: BufReader<ChildStdout>,
}

impl Launcher {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "launcher", "--ignored", "--nocapture"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut ranks = Vec::new();
        while ranks.len() < 2 {
            let mut line = String::new();
            assert_ne!(out.by_ref().take(1000).read_line(&mut line).unwrap(), 0, "the launcher ended early");
            if let Some((_, pid)) = line.split_once("] pid=") {
                ranks.push(pid.trim().parse().unwrap());
            }
        }
        Self { child, ranks, _out: out }
    }

    fn send(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    fn ranks_are_gone(&self) -> bool {
        self.ranks.iter().all(|pid| gone(*pid, Duration::from_secs(10)))
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process ends within this time.
fn gone(pid: i32, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    let state = || std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    // An ended process that nobody waited for is a zombie, and gone.
    while state().is_ok_and(|stat| !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'))) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

#[test]
fn signals_are_passed_on() {
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let mut launcher = Launcher::start();
        launcher.send(signal);
        assert!(launcher.ranks_are_gone(), "{signal}");
        assert_eq!(launcher.child.wait().unwrap().code(), Some(code));
    }
}

#[test]
fn ranks_do_not_outlive_a_launcher_that_is_killed() {
    let mut launcher = Launcher::start();
    launcher.send(Signal::SIGKILL);
    launcher.child.wait().unwrap();
    assert!(launcher.ranks_are_gone());
}
