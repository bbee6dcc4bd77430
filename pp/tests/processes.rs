//! Pipelines on ranks that are processes: this binary starts itself once per rank.
#![allow(clippy::unwrap_used)]

mod models;

use std::env;
use std::net::TcpListener;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ferrotitan_mesh::{Degrees, Mesh, Region};
use ferrotitan_pp::comm::{BoxError, DeviceMesh, ReduceOp, processes};
use ferrotitan_pp::microbatches;
use ferrotitan_pp::schedule::Algorithm;
use tch::Device;

use crate::models::llama::{Case, Outcome, Share, assert_same};
use crate::models::sleepers::{RANKS, Timed, assert_saved};

/// Set in the processes that are ranks.
const IS_RANK: &str = "FERROTITAN_PP_TEST_RANK";
/// How long all ranks of a test may take.
const DEADLINE: Duration = Duration::from_secs(140);
/// How long a rank waits for another.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a forward, an input gradient and a weight gradient of a sleeping stage take each: long beside what it costs a
/// process to be woken, on cores that others use too.
const UNIT: Duration = Duration::from_millis(40);
const ATTEMPTS: usize = 6;
/// A step of less than so many makespans is not measured again.
const ENOUGH: f64 = 1.03;

/// Ranks of a test; none of them outlives it.
struct Children(Vec<Child>);

impl Children {
    fn start(test: &str, size: usize) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut children = Self(Vec::new());
        for rank in 0..size {
            let mut command = Command::new(env::current_exe().unwrap());
            command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(IS_RANK, "1");
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            for (name, value) in
                [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)]
            {
                command.env(name, value.to_string());
            }
            children.0.push(command.spawn().unwrap());
        }
        children
    }

    /// Panics when one fails, or when they take too long.
    fn wait(mut self) {
        let begun = Instant::now();
        while !self.0.is_empty() {
            assert!(begun.elapsed() < DEADLINE, "{} ranks were still running after {DEADLINE:?}", self.0.len());
            sleep(Duration::from_millis(10));
            self.0.retain_mut(|child| match child.try_wait().unwrap() {
                Some(status) => {
                    assert!(status.success(), "a rank ended with {status}");
                    false
                }
                None => true,
            });
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// In the test's own process, starts the ranks, each of which runs this test in its turn. In a rank, runs the body.
fn on_processes(test: &str, size: usize, body: impl FnOnce(DeviceMesh) -> Result<(), BoxError>) {
    if env::var_os(IS_RANK).is_none() {
        return Children::start(test, size).wait();
    }
    tch::set_num_threads(1);
    let (timeout, connect_timeout, device) = (PATIENCE, PATIENCE, Some(Device::Cpu));
    let options = processes::Options { timeout, connect_timeout, device, ..processes::Options::default() };
    processes::run(Degrees { pp: size, ..Degrees::default() }, &options, body).unwrap();
}

#[test]
fn a_step_on_processes_takes_what_the_verifier_says() {
    on_processes("a_step_on_processes_takes_what_the_verifier_says", RANKS, |mesh| {
        let mut found = Vec::new();
        for algorithm in Algorithm::ALL {
            let timed = Timed::new(algorithm);
            let units = timed.measure(&mesh, UNIT, ATTEMPTS, ENOUGH)?;
            if mesh.rank() == 0 {
                let more = 100.0 * (units / timed.makespan - 1.0);
                eprintln!("{algorithm}: {units:.1} units, {more:.1} % more than the verifier's {}", timed.makespan);
            }
            found.push((timed, units));
        }
        // All ranks have found the same.
        if mesh.rank() > 0 {
            return Ok(());
        }
        found.iter().for_each(|(timed, units)| timed.assert_near(*units));
        let of = |algorithm| (algorithm, found.iter().find(|(timed, _)| timed.algorithm == algorithm).unwrap().1);
        assert_saved(of(Algorithm::OneForwardOneBackward), of(Algorithm::Zb1p));
        assert_saved(of(Algorithm::Interleaved1F1B), of(Algorithm::InterleavedZeroBubble));
        assert_saved(of(Algorithm::OneForwardOneBackward), of(Algorithm::ZbvZeroBubble));
        Ok(())
    });
}

/// All ranks' losses and gradients together, if each gradient is on one rank.
fn together(share: &Share, expected: &Outcome, mesh: &DeviceMesh) -> Result<Share, BoxError> {
    let world = mesh.world();
    let count = world.all_reduce_scalar(share.gradients.len() as f64, ReduceOp::Sum)?;
    assert_eq!(count as usize, expected.gradients.len());
    let loss = world.all_reduce_scalar(share.loss, ReduceOp::Sum)?;
    let mut gradients = Vec::new();
    for (name, whole) in &expected.gradients {
        let own = share.gradients.iter().find(|(found, ..)| found == name);
        let own = own.map_or_else(|| whole.zeros_like(), |(_, _, _, gradient)| gradient.shallow_clone());
        let shape: Vec<usize> = whole.size().into_iter().map(|length| length as usize).collect();
        gradients.push((name.clone(), shape.clone(), Region::whole(&shape), world.all_reduce(&own, ReduceOp::Sum)?));
    }
    Ok(Share { loss, gradients })
}

#[test]
fn processes_train_the_model_of_one_rank() {
    on_processes("processes_train_the_model_of_one_rank", 2, |mesh| {
        for case in [
            Case::new(Algorithm::OneForwardOneBackward, 2, 1, 5),
            Case::new(Algorithm::Interleaved1F1B, 2, 2, 6),
            Case::new(Algorithm::ZbvZeroBubble, 2, 2, 4),
        ] {
            let (mut pipeline, expected) = (case.pipeline(&mesh)?, case.alone());
            let loss = pipeline.step(&microbatches(&case.batch(), case.microbatches)?, case.tokens())?;
            let found = together(&Share::new(&loss, &pipeline, &mesh), &expected, &mesh)?;
            assert_same(&[found], &expected, 1.0, &format!("{case:?} on processes"));
            if mesh.rank() == 0 {
                eprintln!(
                    "{}: the loss and {} gradients are those of one rank",
                    case.algorithm,
                    expected.gradients.len()
                );
            }
        }
        Ok(())
    });
}
