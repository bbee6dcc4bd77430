//! The processes backend with ranks as processes: this binary starts itself once per rank.

#![allow(clippy::unwrap_used, missing_docs)]

use std::cell::Cell;
use std::env;
use std::net::TcpListener;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ferrotitan_comm::conformance::{self, Ranks, Verdict};
use ferrotitan_comm::mesh::{Degrees, Grid, Mesh};
use ferrotitan_comm::tch::{Device, Kind, Tensor};
use ferrotitan_comm::{BoxError, DeviceMesh, Error, Op, Recorder, ReduceOp, Result, processes};
use ferrotitan_ext::store::{Store, TcpStoreOptions};

/// Set in the processes that are ranks.
const IS_RANK: &str = "FERROTITAN_COMM_TEST_RANK";

/// How long all ranks of a test may take.
const DEADLINE: Duration = Duration::from_secs(100);

/// In the test's own process: starts `size` ranks, each of which runs this test in its turn, and gives how they ended
/// (`None` by a signal). In a rank: gives nothing.
fn ranks(test: &str, size: usize) -> Option<Vec<Option<i32>>> {
    if env::var_os(IS_RANK).is_some() {
        tch::set_num_threads(1);
        return None;
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let (rank, size) = (rank.to_string(), size.to_string());
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(IS_RANK, "1");
        command.env("RANK", &rank).env("LOCAL_RANK", &rank).env("WORLD_SIZE", &size).env("LOCAL_WORLD_SIZE", &size);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.spawn().unwrap()
    };
    let mut children = Children((0..size).map(start).collect());
    let begun = Instant::now();
    let mut codes = vec![None; size];
    let mut running: Vec<usize> = (0..size).collect();
    while !running.is_empty() {
        assert!(begun.elapsed() < DEADLINE, "ranks {running:?} were still running after {DEADLINE:?}");
        running.retain(|&rank| match children.0[rank].try_wait().unwrap() {
            Some(status) => {
                codes[rank] = status.code();
                false
            }
            None => true,
        });
        thread::sleep(Duration::from_millis(10));
    }
    Some(codes)
}

/// Ends what is still running when a test fails.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// This process's rank, in one world after another.
struct Processes {
    environment: processes::Environment,
    store: Store,
    worlds: Cell<usize>,
}

impl Processes {
    fn new() -> Self {
        let environment = processes::Environment::read().unwrap();
        let options = TcpStoreOptions {
            host: environment.master_addr.clone(),
            port: environment.master_port,
            is_server: environment.rank == 0,
            world_size: Some(environment.world_size),
            timeout: Duration::from_secs(60),
        };
        Processes { store: Store::tcp(&options).unwrap(), environment, worlds: Cell::new(0) }
    }

    /// Ends when all ranks have come here, so that the store outlives its clients.
    fn leave(self) {
        let size = self.environment.world_size as i64;
        if self.store.add("left", 1).unwrap() == size {
            self.store.set("all left", b"1").unwrap();
        }
        self.store.wait(&["all left"], Duration::from_secs(60)).unwrap();
        if self.environment.rank == 0 {
            thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Ranks for Processes {
    fn sizes(&self) -> Vec<usize> {
        vec![self.environment.world_size]
    }

    fn run(&self, degrees: Degrees, timeout: Duration, body: &(dyn Fn(&DeviceMesh) -> Verdict + Sync)) -> Result<()> {
        let world = self.worlds.replace(self.worlds.get() + 1);
        let store = self.store.prefix(&format!("world {world}"));
        let options = processes::Options { timeout, ..processes::Options::default() };
        let rank = self.environment.rank;
        let mesh = processes::connect_through(store, Grid::new(degrees, rank)?, Device::Cpu, &options)?;
        body(&mesh).map_err(|found| {
            mesh.fail(&found);
            Error::RankFailed { rank, source: found.into() }
        })
    }

    fn short(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn detects_mismatch(&self) -> bool {
        false
    }
}

fn pass_the_suite(test: &str, size: usize) {
    match ranks(test, size) {
        Some(codes) => assert_eq!(codes, vec![Some(0); size]),
        None => {
            let ranks = Processes::new();
            conformance::all(&ranks).unwrap();
            ranks.leave();
        }
    }
}

#[test]
fn two_processes_pass_the_suite() {
    pass_the_suite("two_processes_pass_the_suite", 2);
}

#[test]
fn four_processes_pass_the_suite() {
    pass_the_suite("four_processes_pass_the_suite", 4);
}

#[test]
fn a_world_is_found_through_the_environment() {
    let size = 2;
    if let Some(codes) = ranks("a_world_is_found_through_the_environment", size) {
        assert_eq!(codes, vec![Some(0); size]);
        return;
    }
    let options = processes::Options { device: Some(Device::Cpu), ..processes::Options::default() };
    let wrong = processes::connect(Degrees { tp: 3, ..Degrees::default() }, &options);
    assert!(matches!(wrong, Err(Error::Mesh(_))), "{wrong:?}");
    let sum = processes::run(Degrees { tp: size, ..Degrees::default() }, &options, |mesh| {
        mesh.world().all_reduce_scalar(1.0 + mesh.rank() as f64, ReduceOp::Sum)
    });
    assert_eq!(sum.unwrap(), 3.0);
}

#[test]
fn a_failed_process_tells_the_others_why() {
    let size = 3;
    if let Some(codes) = ranks("a_failed_process_tells_the_others_why", size) {
        assert_eq!(codes, vec![Some(0); size]);
        return;
    }
    let options = processes::Options { device: Some(Device::Cpu), ..processes::Options::default() };
    let begun = Instant::now();
    let ran = processes::run(Degrees { dp_shard: size, ..Degrees::default() }, &options, |mesh| match mesh.rank() {
        // The rank that serves the store.
        0 => Err("no more paper".to_owned()),
        // Each waits for the other, so that no connection of theirs breaks by itself.
        rank => mesh.world().recv(&[1], Kind::Float, 3 - rank).map(drop).map_err(|error| error.to_string()),
    });
    let told = ran.unwrap_err().to_string();
    assert!(told.contains("no more paper") && (told.starts_with("rank 0") || told.contains("rank 0 failed")), "{told}");
    assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?}", begun.elapsed());
}

#[test]
fn a_killed_process_ends_the_waiting_of_the_others() {
    let size = 3;
    if let Some(codes) = ranks("a_killed_process_ends_the_waiting_of_the_others", size) {
        assert_eq!(codes, [Some(0), None, Some(0)]);
        return;
    }
    let options = processes::Options {
        timeout: Duration::from_secs(60),
        device: Some(Device::Cpu),
        ..processes::Options::default()
    };
    let mesh = processes::connect(Degrees { dp_shard: size, ..Degrees::default() }, &options).unwrap();
    let group = mesh.world();
    group.barrier().unwrap();
    if mesh.rank() == 1 {
        let own = std::process::id().to_string();
        Command::new("kill").args(["-KILL", &own]).status().unwrap();
        thread::sleep(Duration::from_secs(60));
    }
    let begun = Instant::now();
    let waited = group.all_reduce(&Tensor::ones([1000], (Kind::Float, Device::Cpu)), ReduceOp::Sum);
    assert!(matches!(waited, Err(Error::PeerFailed { .. })), "{waited:?}");
    mesh.fail("another rank is gone");
    assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?}", begun.elapsed());
    // The store is in rank 0's process.
    thread::sleep(Duration::from_millis(if mesh.rank() == 0 { 2500 } else { 0 }));
}

#[test]
fn a_process_that_stands_still_does_not_hold_the_others() {
    // Rank 0 serves the store, which then answers nobody.
    let size = 3;
    if let Some(codes) = ranks("a_process_that_stands_still_does_not_hold_the_others", size) {
        assert_eq!(codes, [None, Some(0), Some(0)]);
        return;
    }
    let (timeout, connect_timeout) = (Duration::from_secs(3), Duration::from_secs(20));
    let options = processes::Options { timeout, connect_timeout, ..processes::Options::default() };
    let degrees = Degrees { dp_shard: size, ..Degrees::default() };
    let mut stopped = Instant::now();
    let ended = processes::run(degrees, &options, |mesh| {
        mesh.world().barrier()?;
        stopped = Instant::now();
        if mesh.rank() == 0 {
            // Ended once the others have had their time.
            let own = std::process::id().to_string();
            let mut later = Command::new("sh").args(["-c", "sleep 25; kill -KILL $0", &own]).spawn().unwrap();
            Command::new("kill").args(["-STOP", &own]).status().unwrap();
            later.wait().unwrap();
        }
        mesh.world().barrier()
    });
    let error = ended.unwrap_err();
    assert!(stopped.elapsed() < Duration::from_secs(20), "{:?}: {error}", stopped.elapsed());
}

#[test]
fn a_process_that_waits_is_told_of_a_failure() {
    let size = 3;
    if let Some(codes) = ranks("a_process_that_waits_is_told_of_a_failure", size) {
        assert_eq!(codes, vec![Some(0); size]);
        return;
    }
    let told = Arc::new(Mutex::new(None));
    let (telling, recorder) = (told.clone(), Arc::new(Mutex::new(None::<Recorder>)));
    let seen = recorder.clone();
    let on_failure = processes::OnFailure::new(move |rank, reason| {
        let waits = seen.lock().unwrap().as_ref().and_then(|recorder| recorder.events().pop());
        let waits = waits.is_some_and(|event| event.op == Op::Recv && event.finished.is_none());
        *telling.lock().unwrap() = Some((rank, reason.to_owned(), waits));
    });
    let options =
        processes::Options { device: Some(Device::Cpu), on_failure: Some(on_failure), ..processes::Options::default() };
    let ran = processes::run(Degrees { dp_shard: size, ..Degrees::default() }, &options, |mesh| {
        *recorder.lock().unwrap() = Some(mesh.recorder().clone());
        mesh.world().barrier()?;
        match mesh.rank() {
            1 => {
                thread::sleep(Duration::from_secs(2));
                Err(BoxError::from("no more paper"))
            }
            // Each waits for the other, so that no connection of theirs breaks by itself.
            rank => Ok(mesh.world().recv(&[1], Kind::Float, 2 - rank).map(drop)?),
        }
    });
    let rank: usize = env::var("RANK").unwrap().parse().unwrap();
    let told = told.lock().unwrap().clone();
    assert!(ran.is_err());
    assert_eq!(told, (rank != 1).then(|| (1, "no more paper".to_owned(), true)));
}
