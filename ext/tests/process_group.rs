//! Gloo's collectives between threads, against the same thing computed at once; and what happens when ranks fail.
#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::time::{Duration, Instant};

use ferrotitan_ext::Error;
use ferrotitan_ext::process_group::{GlooOptions, NcclOptions, ProcessGroup, ReduceOp, nccl_available};
use ferrotitan_ext::store::{Store, TcpStoreOptions};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const LONG: Duration = Duration::from_secs(20);

fn options(timeout: Duration) -> GlooOptions {
    GlooOptions { timeout, ..GlooOptions::default() }
}

/// Runs `body` on a thread for each rank of a group, and gives the results in the order of ranks.
fn ranks<R: Send>(size: usize, timeout: Duration, body: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    tch::set_num_threads(1);
    let store = Store::hash();
    std::thread::scope(|scope| {
        let (store, body) = (&store, &body);
        let threads: Vec<_> = (0..size)
            .map(|rank| scope.spawn(move || body(ProcessGroup::gloo(store, rank, size, &options(timeout)).unwrap())))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Small whole numbers, which every kind here holds exactly, and sums of which it does too.
fn values(rank: usize, shape: &[i64], kind: Kind) -> Tensor {
    let count: i64 = shape.iter().product();
    ((Tensor::arange(count, (Kind::Int64, Device::Cpu)) * 7 + 3 * rank as i64 + 1).remainder(5) - 1)
        .view(shape)
        .to_kind(kind)
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop::sample::select(vec![Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half, Kind::Int64, Kind::Int])
}

fn assert_same(left: &Tensor, right: &Tensor) {
    assert_eq!(left.kind(), right.kind());
    assert_eq!(left.size(), right.size());
    assert!(left.equal(right), "{left:?} {right:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn collectives_of_equal_parts(size in 1usize..=4, rows in 1i64..4, kind in kinds(), root in 0usize..4) {
        let root = root % size;
        ranks(size, LONG, |group| {
            let rank = group.rank();
            let shape = [rows, 3];
            let all: Vec<Tensor> = (0..size).map(|rank| values(rank, &shape, kind)).collect();
            let wait = |work: Result<ferrotitan_ext::process_group::Work, Error>| {
                let work = work.unwrap();
                work.wait(None).unwrap();
                work.wait(Some(LONG)).unwrap();
                assert!(work.is_completed());
            };

            let stacked = Tensor::stack(&all, 0);
            for (op, want) in [
                (ReduceOp::Sum, stacked.sum_dim_intlist([0i64].as_slice(), false, kind)),
                (ReduceOp::Product, stacked.prod_dim_int(0, false, kind)),
                (ReduceOp::Min, stacked.amin([0i64].as_slice(), false)),
                (ReduceOp::Max, stacked.amax([0i64].as_slice(), false)),
            ] {
                let mine = all[rank].copy();
                wait(group.all_reduce(&mine, op));
                assert_same(&mine, &want);
                let mine = all[rank].copy();
                wait(group.reduce(&mine, root, op));
                if rank == root {
                    assert_same(&mine, &want);
                }
            }

            let gathered = Tensor::zeros([size as i64 * rows, 3], (kind, Device::Cpu));
            wait(group.all_gather_into(&gathered, &all[rank]));
            assert_same(&gathered, &Tensor::cat(&all, 0));

            let outputs: Vec<Tensor> = all.iter().map(Tensor::zeros_like).collect();
            wait(group.all_gather(&outputs, &all[rank]));
            outputs.iter().zip(&all).for_each(|(output, want)| assert_same(output, want));

            let outputs: Vec<Tensor> = if rank == root { all.iter().map(Tensor::zeros_like).collect() } else { vec![] };
            wait(group.gather(&outputs, &all[rank], root));
            outputs.iter().zip(&all).for_each(|(output, want)| assert_same(output, want));

            let mine = all[rank].zeros_like();
            wait(group.scatter(&mine, if rank == root { &all } else { &[] }, root));
            assert_same(&mine, &all[rank]);

            let whole = |rank: usize| values(rank + 10, &[size as i64 * rows, 3], kind);
            let sum: Tensor = (0..size).map(whole).sum();
            let mine = all[rank].zeros_like();
            wait(group.reduce_scatter_from(&mine, &whole(rank), ReduceOp::Sum));
            assert_same(&mine, &sum.narrow(0, rank as i64 * rows, rows));

            let mine = all[rank].copy();
            wait(group.broadcast(&mine, root));
            assert_same(&mine, &all[root]);
            wait(group.barrier());
        });
    }

    #[test]
    fn collectives_of_uneven_parts(
        rows in prop::collection::vec(0i64..4, 1..=4),
        sent in prop::collection::vec(0i64..4, 16),
        kind in kinds(),
    ) {
        let size = rows.len();
        ranks(size, LONG, |group| {
            let rank = group.rank();
            let part = |(rank, &rows): (usize, &i64)| values(rank, &[rows, 2], kind);
            let all: Vec<Tensor> = rows.iter().enumerate().map(part).collect();
            let outputs: Vec<Tensor> = all.iter().map(Tensor::zeros_like).collect();
            group.all_gather(&outputs, &all[rank]).unwrap().wait(None).unwrap();
            outputs.iter().zip(&all).for_each(|(output, want)| assert_same(output, want));

            let parts = |rank: usize| -> Vec<Tensor> {
                rows.iter().enumerate().map(|(to, &rows)| values(rank + 5 * to, &[rows, 2], kind)).collect()
            };
            let mine = all[rank].zeros_like();
            let inputs = parts(rank);
            group.reduce_scatter(&mine, &inputs, ReduceOp::Sum).unwrap().wait(None).unwrap();
            assert_same(&mine, &(0..size).map(|from| parts(from).swap_remove(rank)).sum());
            inputs.iter().zip(parts(rank)).for_each(|(input, before)| assert_same(input, &before));

            let rows_between = |from: usize, to: usize| sent[4 * from + to];
            let message = |from: usize, to: usize| values(from + 7 * to, &[rows_between(from, to), 2], kind);
            let input = Tensor::cat(&(0..size).map(|to| message(rank, to)).collect::<Vec<_>>(), 0);
            let want = Tensor::cat(&(0..size).map(|from| message(from, rank)).collect::<Vec<_>>(), 0);
            let output = want.zeros_like();
            let input_splits: Vec<i64> = (0..size).map(|to| rows_between(rank, to)).collect();
            let output_splits: Vec<i64> = (0..size).map(|from| rows_between(from, rank)).collect();
            group.all_to_all(&output, &input, &output_splits, &input_splits).unwrap().wait(None).unwrap();
            assert_same(&output, &want);
        });
    }
}

#[test]
fn float8_and_bool_travel() {
    for kind in [Kind::Float8e4m3fn, Kind::Float8e5m2, Kind::Bool] {
        ranks(3, LONG, |group| {
            let rank = group.rank();
            let make = |rank| values(rank, &[2, 4], Kind::Float).to_kind(kind);
            let floats = |tensor: &Tensor| tensor.to_kind(Kind::Float);
            let gathered = Tensor::zeros([6, 4], (Kind::Float, Device::Cpu)).to_kind(kind);
            group.all_gather_into(&gathered, &make(rank)).unwrap().wait(None).unwrap();
            assert_same(
                &floats(&gathered),
                &floats(&Tensor::cat(&[make(0), make(1), make(2)].map(|it| floats(&it)), 0).to_kind(kind)),
            );
            let got = make(rank);
            group.broadcast(&got, 2).unwrap().wait(None).unwrap();
            assert_same(&floats(&got), &floats(&make(2)));
            let (to, from) = ((rank + 1) % 3, (rank + 2) % 3);
            let (mine, theirs) = (make(rank), make(rank));
            let (send, recv) = (group.send(&mine, to, 0).unwrap(), group.recv(&theirs, from, 0).unwrap());
            recv.wait(None).unwrap();
            send.wait(None).unwrap();
            assert_same(&floats(&theirs), &floats(&make(from)));
            let swapped = make(rank).narrow(0, 0, 2).copy();
            let splits = |peers: [i64; 3]| peers;
            let (input, output) = if rank == 2 { ([0; 3], [0; 3]) } else { (splits([1, 1, 0]), splits([1, 1, 0])) };
            let own = if rank == 2 { make(2).narrow(0, 0, 0) } else { make(rank) };
            let out = if rank == 2 { swapped.narrow(0, 0, 0) } else { swapped };
            group.all_to_all(&out, &own, &output, &input).unwrap().wait(None).unwrap();
            if rank < 2 {
                let want = Tensor::cat(&[0, 1].map(|from| floats(&make(from)).narrow(0, rank as i64, 1)), 0);
                assert_same(&floats(&out), &want);
            }
        });
    }
}

#[test]
fn messages_of_several_tags_and_sizes() {
    ranks(2, LONG, |group| {
        let peer = 1 - group.rank();
        let big = Tensor::arange(300_000, (Kind::Double, Device::Cpu)) + group.rank() as f64;
        let small = Tensor::from_slice(&[group.rank() as f32]);
        let (got_big, got_small) = (big.zeros_like(), small.zeros_like());
        // Received in the other order than sent.
        let works = [
            group.send(&big, peer, 1).unwrap(),
            group.send(&small, peer, 2).unwrap(),
            group.recv(&got_small, peer, 2).unwrap(),
            group.recv(&got_big, peer, 1).unwrap(),
        ];
        works.iter().for_each(|work| work.wait(Some(LONG)).unwrap());
        works.iter().for_each(|work| work.wait(None).unwrap());
        assert!(works.iter().all(|work| work.is_completed()));
        assert_eq!(got_big.double_value(&[0]), peer as f64);
        assert_eq!(got_small.double_value(&[0]), peer as f64);
    });
}

#[test]
fn work_keeps_its_tensors_and_outlives_its_group() {
    ranks(2, LONG, |group| {
        let tensor = Tensor::ones([1000], (Kind::Float, Device::Cpu));
        let view = tensor.shallow_clone();
        let work = group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
        drop(tensor);
        let later = group.barrier().unwrap();
        // Dropped without a wait: the operation goes on.
        drop(group.all_reduce(&Tensor::ones([1000], (Kind::Float, Device::Cpu)), ReduceOp::Sum).unwrap());
        drop(group);
        work.wait(None).unwrap();
        later.wait(None).unwrap();
        assert_eq!(view.sum(Kind::Float).double_value(&[]), 2000.0);
    });
}

#[test]
fn autograd_does_not_see_what_is_written() {
    ranks(2, LONG, |group| {
        let w = Tensor::ones([4], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let loss = w.square().sum(Kind::Double);
        group.all_reduce(&w, ReduceOp::Max).unwrap().wait(None).unwrap();
        group
            .reduce_scatter_from(&w, &Tensor::ones([8], (Kind::Double, Device::Cpu)), ReduceOp::Max)
            .unwrap()
            .wait(None)
            .unwrap();
        loss.backward();
        assert_eq!(w.grad().sum(Kind::Double).double_value(&[]), 8.0);
    });
}

#[test]
fn several_groups_over_one_store() {
    tch::set_num_threads(1);
    let store = Store::hash();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let store = store.clone();
            scope.spawn(move || {
                let (row, column) = (rank / 2, rank % 2);
                let rows = ProcessGroup::gloo(&store.prefix(&format!("row{row}")), column, 2, &options(LONG)).unwrap();
                let columns =
                    ProcessGroup::gloo(&store.prefix(&format!("column{column}")), row, 2, &options(LONG)).unwrap();
                let tensor = Tensor::from_slice(&[rank as i64]);
                rows.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait(None).unwrap();
                columns.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait(None).unwrap();
                assert_eq!(tensor.int64_value(&[0]), 6);
            });
        }
    });
}

/// Runs `body`, which must not take anything like the group's long timeout.
fn quick<R>(body: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = body();
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    result
}

#[test]
fn a_wait_has_a_timeout_of_its_own() {
    ranks(2, LONG, |group| {
        let tensor = Tensor::ones([4], (Kind::Float, Device::Cpu));
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
            group.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait(None).unwrap();
            return;
        }
        let work = group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
        assert!(!work.is_completed());
        let error = quick(|| work.wait(Some(Duration::from_millis(100)))).unwrap_err();
        assert!(matches!(&error, Error::Timeout { op: "all_reduce", after, .. } if after.as_millis() >= 90), "{error}");
        // The operation itself goes on.
        work.wait(None).unwrap();
        assert_eq!(tensor.double_value(&[0]), 2.0);
    });
}

#[test]
fn the_groups_timeout_ends_every_wait() {
    for operation in 0..3 {
        ranks(2, Duration::from_millis(500), |group| {
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(900));
                return;
            }
            let tensor = Tensor::ones([4], (Kind::Float, Device::Cpu));
            let work = match operation {
                0 => group.all_reduce(&tensor, ReduceOp::Sum),
                1 => group.recv(&tensor, 1, 0),
                _ => group.barrier(),
            };
            let error = quick(|| work.unwrap().wait(None)).unwrap_err();
            assert!(error.is_timeout(), "{error}");
        });
    }
}

#[test]
fn a_receive_has_a_timeout_of_its_own() {
    ranks(2, LONG, |group| {
        if group.rank() == 0 {
            let work = group.recv(&Tensor::ones([4], (Kind::Float, Device::Cpu)), 1, 0).unwrap();
            assert!(!work.is_completed());
            let error = quick(|| work.wait(Some(Duration::from_millis(100)))).unwrap_err();
            assert!(error.is_timeout(), "{error}");
        } else {
            std::thread::sleep(Duration::from_millis(400));
        }
    });
}

#[test]
fn ranks_that_do_not_come_are_an_error() {
    let store = Store::hash();
    let error = quick(|| ProcessGroup::gloo(&store, 0, 2, &options(Duration::from_millis(300)))).unwrap_err();
    assert!(error.is_timeout(), "{error}");
}

#[test]
fn a_peer_that_leaves_is_an_error() {
    ranks(3, LONG, |group| {
        let tensor = Tensor::ones([4], (Kind::Float, Device::Cpu));
        match group.rank() {
            // The thread ends and takes its group with it, as a process does.
            2 => std::thread::sleep(Duration::from_millis(100)),
            _ => {
                let error = quick(|| group.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait(None)).unwrap_err();
                assert!(matches!(error, Error::Torch { op: "all_reduce", .. }), "{error}");
                // So is every later operation.
                let later = quick(|| group.all_reduce(&tensor, ReduceOp::Sum).and_then(|work| work.wait(None)));
                assert!(later.is_err());
            }
        }
    });
}

fn tcp_group(rank: usize, port: u16) -> ProcessGroup {
    let host = "127.0.0.1".to_owned();
    let store =
        Store::tcp(&TcpStoreOptions { host, port, is_server: rank == 0, world_size: None, timeout: LONG }).unwrap();
    if rank == 0 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process"])
            .env("FERROTITAN_TEST_GROUP_PORT", store.port().unwrap().to_string())
            .spawn()
            .unwrap();
        std::thread::spawn(move || child.wait());
    }
    ProcessGroup::gloo(&store, rank, 2, &options(LONG)).unwrap()
}

/// The other process of the test below: this test binary again, where it does nothing unless told so.
#[test]
fn child_process() {
    if let Ok(port) = std::env::var("FERROTITAN_TEST_GROUP_PORT") {
        let group = tcp_group(1, port.parse().unwrap());
        let tensor = Tensor::from_slice(&[1i64]);
        group.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait(None).unwrap();
        // As if killed: no destructor runs.
        std::process::abort();
    }
}

#[test]
fn a_process_that_dies_is_an_error() {
    let group = tcp_group(0, 0);
    let tensor = Tensor::from_slice(&[2i64]);
    group.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait(None).unwrap();
    assert_eq!(tensor.int64_value(&[0]), 3);
    let error = quick(|| group.all_reduce(&tensor, ReduceOp::Sum).and_then(|work| work.wait(None))).unwrap_err();
    assert!(matches!(error, Error::Torch { .. }), "{error}");
    quick(|| drop(group));
}

#[test]
fn an_abort_wakes_everybody() {
    for operation in 0..2 {
        ranks(3, LONG, |group| {
            let tensor = Tensor::ones([4], (Kind::Float, Device::Cpu));
            std::thread::scope(|scope| {
                if group.rank() == 2 {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(200));
                        group.abort().unwrap();
                    });
                }
                // Rank 2 waits as well, for ranks that never do their part in this order.
                let work = match (operation, group.rank()) {
                    (0, 0) => group.recv(&tensor, 2, 7),
                    (0, _) => group.all_reduce(&tensor, ReduceOp::Sum),
                    (_, rank) => group.recv(&tensor, (rank + 1) % 3, 7),
                };
                let error = quick(|| work.unwrap().wait(None)).unwrap_err();
                assert!(matches!(error, Error::Torch { .. }), "{error}");
            });
            quick(|| drop(group));
        });
    }
}

#[test]
fn bad_arguments_are_refused() {
    let store = Store::hash();
    for (rank, size) in [(1, 1), (0, 0), (5, 2)] {
        assert!(matches!(ProcessGroup::gloo(&store, rank, size, &options(LONG)), Err(Error::Argument { .. })));
    }
    let bad = GlooOptions { interface: Some("nonexistent0".to_owned()), ..options(LONG) };
    assert!(matches!(ProcessGroup::gloo(&store, 0, 1, &bad), Err(Error::Torch { .. })));
    let bad = GlooOptions { hostname: Some("a\0b".to_owned()), ..options(LONG) };
    assert!(matches!(ProcessGroup::gloo(&store, 0, 1, &bad), Err(Error::Argument { .. })));

    let group = ProcessGroup::gloo(&store, 0, 1, &options(LONG)).unwrap();
    let tensor = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    let refused = |work: Result<ferrotitan_ext::process_group::Work, Error>| match work.and_then(|work| work.wait(None))
    {
        Err(Error::Argument { .. } | Error::Torch { .. }) => true,
        other => panic!("{other:?}"),
    };
    assert!(refused(group.broadcast(&tensor, 1)));
    assert!(refused(group.send(&tensor, 0, 0)));
    assert!(refused(group.recv(&tensor, 3, 0)));
    assert!(refused(group.all_gather(&[], &tensor)));
    assert!(refused(group.all_gather(&[tensor.to_kind(Kind::Double)], &tensor)));
    assert!(refused(group.all_gather_into(&Tensor::ones([3], (Kind::Float, Device::Cpu)), &tensor)));
    assert!(refused(group.reduce_scatter(&tensor, &[], ReduceOp::Sum)));
    assert!(refused(group.gather(&[], &tensor, 0)));
    assert!(refused(group.scatter(&tensor, &[], 0)));
    assert!(refused(group.all_to_all(&tensor, &tensor, &[2], &[3])));
    assert!(refused(group.all_to_all(&tensor, &tensor, &[2, 0], &[2])));
    assert!(refused(group.all_reduce(&Tensor::new(), ReduceOp::Sum)));
    assert!(refused(group.all_reduce(&Tensor::ones([2, 3], (Kind::Float, Device::Cpu)).tr(), ReduceOp::Sum)));
    // The group is as good as before.
    group.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait(None).unwrap();
}

#[test]
fn nccl_says_why_not() {
    let store = Store::hash();
    match nccl_available() {
        Ok(()) => assert!(ferrotitan_ext::cuda::is_available()),
        Err(why) => {
            let error = ProcessGroup::nccl(&store, 0, 1, &NcclOptions::default()).unwrap_err();
            assert!(matches!(&error, Error::Unsupported { what: "nccl", why: said } if *said == why), "{error}");
        }
    }
}
