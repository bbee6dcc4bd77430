//! The threads backend: the conformance suite, drawn cases, and what only threads do.

#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ferrotitan_comm::conformance::{self, Case, Ranks, Verdict};
use ferrotitan_comm::mesh::{Degrees, Mesh, View};
use ferrotitan_comm::tch::{Device, Kind, Tensor};
use ferrotitan_comm::{DeviceMesh, Error, Event, Failure, Group, Op, ReduceOp, Result, threads};
use proptest::prelude::*;

fn options(timeout: Duration) -> threads::Options {
    threads::Options { timeout, intra_op_threads: Some(1), ..threads::Options::default() }
}

fn run<T: Send>(size: usize, body: impl Fn(Group) -> Result<T, String> + Sync) -> Result<Vec<T>> {
    let degrees = Degrees { dp_shard: size, ..Degrees::default() };
    threads::run(degrees, &options(Duration::from_secs(30)), |mesh| body(mesh.world()))
}

struct Threads;

impl Ranks for Threads {
    fn sizes(&self) -> Vec<usize> {
        (1..=8).collect()
    }

    fn run(&self, degrees: Degrees, timeout: Duration, body: &(dyn Fn(&DeviceMesh) -> Verdict + Sync)) -> Result<()> {
        threads::run(degrees, &options(timeout), |mesh| body(&mesh)).map(drop)
    }

    fn short(&self) -> Duration {
        Duration::from_millis(200)
    }

    fn detects_mismatch(&self) -> bool {
        true
    }
}

#[test]
fn passes_the_suite() {
    conformance::all(&Threads).unwrap();
}

fn cases(kinds: &'static [Kind]) -> impl Strategy<Value = Case> {
    let axes = prop::collection::vec(0_usize..4, 1..4).prop_flat_map(|shape| {
        let rank = shape.len();
        (Just(shape), 0..rank, 0..rank)
    });
    let sizes = || prop_oneof![(0_usize..5).prop_map(|length| vec![length; 8]), prop::collection::vec(0_usize..5, 8)];
    (axes, sizes(), sizes(), prop::sample::select(kinds), any::<u64>()).prop_map(
        |((shape, axis, other_axis), sizes, other_sizes, kind, seed)| Case {
            shape,
            axis,
            other_axis,
            sizes,
            other_sizes,
            kind,
            seed,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_moves_arrives(size in 1_usize..9, case in cases(&Case::KINDS)) {
        let checks = [
            conformance::check_all_gather,
            conformance::check_all_to_all,
            conformance::check_broadcast,
            conformance::check_ring,
        ];
        let ran = run(size, |group| checks.iter().try_for_each(|check| check(&group, &case)));
        prop_assert!(ran.is_ok(), "{}", ran.unwrap_err());
    }

    #[test]
    fn what_is_combined_is_the_dense_result(size in 1_usize..9, case in cases(&Case::NUMBERS)) {
        let checks = [conformance::check_all_reduce, conformance::check_reduce_scatter];
        let ran = run(size, |group| checks.iter().try_for_each(|check| check(&group, &case)));
        prop_assert!(ran.is_ok(), "{}", ran.unwrap_err());
    }
}

#[test]
fn sums_are_those_of_rank_order_to_the_bit() {
    // Values of very different sizes, so that any other order of additions shows.
    let values = |rank: usize| {
        tch::manual_seed(rank as i64);
        Tensor::randn([70_001], (Kind::Float, Device::Cpu)) * 10_f64.powi(rank as i32)
    };
    let inputs: Vec<Tensor> = (0..5).map(values).collect();
    let expected = inputs[1..].iter().fold(inputs[0].copy(), |sum, tensor| sum + tensor);
    let reversed = inputs[..4].iter().rev().fold(inputs[4].copy(), |sum, tensor| sum + tensor);
    assert_ne!(expected, reversed, "the test cannot tell orders apart");
    let inputs = std::sync::Mutex::new(inputs);
    for _ in 0..3 {
        let sums = run(5, |group| {
            let own = inputs.lock().unwrap()[group.rank()].copy();
            let scattered = group.reduce_scatter_uneven(&own, 0, &[70_000, 0, 0, 0, 1]).unwrap();
            let whole = group.all_reduce(&own, ReduceOp::Sum).unwrap();
            let start = if group.rank() == 0 { 0 } else { 70_000 };
            assert_eq!(scattered, whole.narrow(0, start, scattered.size()[0]));
            Ok(whole)
        });
        assert!(sums.unwrap().iter().all(|sum| *sum == expected));
    }
}

#[test]
fn a_panic_ends_the_run_and_is_its_cause() {
    let told = AtomicUsize::new(0);
    let ran = run(4, |group| {
        assert_ne!(group.rank(), 2, "a deliberate panic");
        match group.barrier() {
            Err(Error::PeerFailed { rank: Some(2), reason }) if reason.contains("a deliberate panic") => {
                told.fetch_add(1, Ordering::Relaxed);
                Err::<(), _>("told".to_owned())
            }
            other => Err(format!("{other:?}")),
        }
    });
    assert!(matches!(&ran, Err(Error::RankPanicked { rank: 2, message }) if message.contains("a deliberate panic")));
    assert_eq!(told.into_inner(), 3);
}

#[test]
fn an_early_return_is_an_error_to_those_who_wait() {
    let ran = run(3, |group| match group.rank() {
        1 => Ok(()),
        _ => group.barrier().map_err(|error| error.to_string()),
    });
    let error = ran.unwrap_err().to_string();
    assert!(error.contains("rank 1 failed: it has returned"), "{error}");
}

#[test]
fn a_message_outlives_its_sender() {
    let ran = run(2, |group| {
        if group.rank() == 0 {
            group.send(&Tensor::from_slice(&[7_i64]), 1).unwrap();
            return Ok(7);
        }
        std::thread::sleep(Duration::from_millis(50));
        Ok(group.recv(&[1], Kind::Int64, 0).unwrap().int64_value(&[0]))
    });
    assert_eq!(ran.unwrap(), [7, 7]);
}

#[test]
fn a_message_of_another_shape_is_a_mismatch_whoever_comes_first() {
    for receiver_first in [true, false] {
        let ran = run(2, |group| {
            let wait = || std::thread::sleep(Duration::from_millis(50));
            let result = if group.rank() == 0 {
                if receiver_first {
                    wait();
                }
                group.send(&Tensor::zeros([3], (Kind::Float, Device::Cpu)), 1).and_then(|()| group.barrier())
            } else {
                if !receiver_first {
                    wait();
                }
                group.recv(&[4], Kind::Float, 0).map(drop)
            };
            match result {
                Err(Error::Mismatch { called, other_called, .. })
                    if called.contains("[3]") != other_called.contains("[3]") =>
                {
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            }
        });
        ran.unwrap();
    }
}

#[test]
fn an_error_of_a_backward_collective_ends_the_backward_pass() {
    let ran = run(2, |group| {
        let own = Tensor::ones([2], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let sum = group.copy_autograd(&own).unwrap().sum(Kind::Double);
        if group.rank() == 1 {
            // Instead of its backward pass.
            return group.barrier().map_err(|error| error.to_string());
        }
        sum.f_backward().map_err(|error| error.to_string())
    });
    let error = ran.unwrap_err().to_string();
    assert!(error.contains("barrier") && error.contains("all-reduce of Double [2]"), "{error}");
}

#[test]
fn the_recorder_counts_what_was_called() {
    let degrees = Degrees { dp_shard: 2, tp: 2, ..Degrees::default() };
    let events = threads::run(degrees, &options(Duration::from_secs(30)), |mesh| -> Result<_> {
        let (tp, fsdp) = (mesh.group(View::TP)?, mesh.group(View::FSDP)?);
        let mark = mesh.recorder().mark();
        let own = Tensor::ones([6, 2], (Kind::Float, mesh.device()));
        let pending = tp.all_gather_start(&own, 0)?;
        let unfinished = mesh.recorder().since(mark)[0].finished.is_none();
        let whole = pending.wait()?;
        let _ = fsdp.reduce_scatter(&whole, 0)?;
        if fsdp.rank() == 0 {
            fsdp.send(&own, 1)?
        } else {
            drop(fsdp.recv(&[6, 2], Kind::Float, 0)?)
        }
        // Groups of size 1 do nothing.
        mesh.group(View::CP)?.barrier()?;
        let _ = mesh.group(View::PP)?.all_reduce(&own, ReduceOp::Sum)?;
        let bytes =
            (mesh.recorder().total("tp", Op::AllGather).bytes, mesh.recorder().total("fsdp", Op::ReduceScatter).bytes);
        Ok((mesh.rank(), unfinished, bytes, mesh.recorder().since(mark)))
    });
    for (rank, unfinished, bytes, events) in events.unwrap() {
        assert!(unfinished);
        assert_eq!(bytes, (6 * 2 * 4, 6 * 2 * 4));
        let last = if rank < 2 { Op::Send } else { Op::Recv };
        let found: Vec<_> = events.iter().map(|event| (&*event.group, event.op, event.sequence)).collect();
        assert_eq!(found, [("tp", Op::AllGather, 0), ("fsdp", Op::ReduceScatter, 0), ("fsdp", last, 0)]);
        assert_eq!(events[2].peer, Some((rank + 2) % 4));
        assert!(events.iter().all(|event| event.finished >= event.waited && event.waited.unwrap() >= event.issued));
    }
}

#[test]
fn bad_degrees_are_refused() {
    let degrees = Degrees { tp: 0, ..Degrees::default() };
    assert!(matches!(
        threads::run(degrees, &options(Duration::from_secs(1)), |_| Ok::<_, Error>(())),
        Err(Error::Mesh(_))
    ));
}

#[test]
fn sixteen_ranks_are_cheap() {
    let begun = Instant::now();
    let sums = run(16, |group| group.all_reduce_scalar(group.rank() as f64, ReduceOp::Sum).map_err(|e| e.to_string()));
    assert_eq!(sums.unwrap(), [120.0; 16]);
    assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
}

#[test]
fn ranks_may_move_between_threads() {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<(DeviceMesh, Group, ferrotitan_comm::Recorder)>();
    moved::<ferrotitan_comm::Pending<Tensor>>();
}

#[test]
fn a_rank_that_told_of_its_failure_is_the_cause() {
    let degrees = Degrees { dp_shard: 2, ..Degrees::default() };
    let run = |returns: Result<(), String>| {
        threads::run(degrees, &options(Duration::from_secs(30)), |mesh| {
            if mesh.rank() == 1 {
                mesh.fail("the disk is full");
                return returns.clone();
            }
            mesh.world().barrier().map_err(|error| error.to_string())
        })
    };
    let error = run(Err("the disk is full".into())).unwrap_err();
    assert!(matches!(&error, Error::RankFailed { rank: 1, .. }), "{error}");
    // Told, and then returned a value all the same: the run did not succeed.
    let error = run(Ok(())).unwrap_err();
    assert!(error.to_string().contains("the disk is full"), "{error}");
}

#[test]
fn messages_are_counted_from_rank_to_rank_and_failures_are_noted() {
    let degrees = Degrees { dp_shard: 3, ..Degrees::default() };
    let events = threads::run(degrees, &options(Duration::from_millis(300)), |mesh| {
        let (group, own) = (mesh.world(), Tensor::ones([2], (Kind::Float, mesh.device())));
        let receive = |from| group.recv(&[2], Kind::Float, from).map(drop);
        match mesh.rank() {
            0 => (0..2).try_for_each(|_| group.send(&own, 2))?,
            1 => group.send(&own, 2)?,
            _ => [1, 0, 0].into_iter().try_for_each(receive)?,
        }
        group.barrier()?;
        assert_eq!(group.entered(), 1, "messages do not count");
        assert_eq!(mesh.groups().keys().collect::<Vec<_>>(), ["batch", "dp_shard", "fsdp", "loss", "world"]);
        if mesh.rank() == 2 {
            let late = receive(0).unwrap_err();
            assert!(matches!(&late, Error::Timeout { waiting_for, .. } if waiting_for == &[0]), "{late}");
        }
        // Those that are done first wait for nothing more.
        std::thread::sleep(Duration::from_millis(600));
        Ok::<_, Error>(mesh.recorder().events())
    });
    let found = |rank: usize, events: &[Event]| -> Vec<_> {
        let messages = events.iter().filter(|event| event.op.is_point_to_point());
        messages.map(|event| (rank, event.peer.unwrap(), event.sequence, event.failed)).collect()
    };
    let events = events.unwrap();
    assert_eq!(found(0, &events[0]), [(0, 2, 0, None), (0, 2, 1, None)]);
    assert_eq!(found(1, &events[1]), [(1, 2, 0, None)]);
    let late = Some(Failure::Timeout);
    assert_eq!(found(2, &events[2]), [(2, 1, 0, None), (2, 0, 0, None), (2, 0, 1, None), (2, 0, 2, late)]);
    assert_eq!(events[2].last().unwrap().signature(), "recv of Float [2] from group rank 0");
}
