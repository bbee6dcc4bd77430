//! What goes wrong, and how every rank is told.

use std::thread;

use ferrotitan_mesh::{Degrees, Mesh};
use tch::{Kind, Tensor};

use super::moving::number;
use super::{PATIENT, Ranks, Verdict, ensure, on_worlds, told};
use crate::{Error, Group, Op, ReduceOp, Result};

pub(super) fn arguments(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        let mark = group.recorder().mark();
        let own = Tensor::zeros([3, 5], (Kind::Float, group.device()));
        let (size, too_many) = (group.size(), vec![1; group.size() + 1]);
        let mut short = Tensor::zeros([1], (Kind::Float, group.device()));
        let mut refused = vec![
            group.all_gather(&own, 2),
            group.all_gather_uneven(&own, 0, &too_many),
            group.all_gather_uneven(&own, 0, &vec![4; size]),
            group.reduce_scatter_uneven(&own, 0, &vec![4; size]),
            group.all_to_all_uneven(&own, 0, 1, &vec![usize::MAX; size], &vec![5; size]),
            group.all_to_all(&own, 7, 0),
            group.broadcast(&own, size),
            group.recv(&[1], Kind::Float, size),
            group.recv(&[1], Kind::Float, group.rank()),
            group.send(&own, size).map(|()| own.shallow_clone()),
            group.all_gather_into(&mut short, &own, 0, &vec![3; size]).map(|()| own.shallow_clone()),
        ];
        if size > 1 {
            refused.push(group.reduce_scatter(&Tensor::zeros([size as i64 + 1], (Kind::Float, group.device())), 0));
            refused.push(group.all_reduce(&own.to_kind(Kind::Bool), ReduceOp::Sum));
        }
        for (i, result) in refused.into_iter().enumerate() {
            ensure(matches!(result, Err(Error::Argument { .. })), || format!("number {i} gave {result:?}"))?;
        }
        let sent = group.recorder().since(mark);
        ensure(sent.is_empty(), || format!("something was sent: {sent:?}"))?;
        group.barrier().map_err(told)
    })
}

/// Every world of at least two ranks.
fn large(ranks: &dyn Ranks) -> impl Iterator<Item = Degrees> {
    ranks.sizes().into_iter().filter(|&size| size > 1).map(|size| Degrees { dp_replicate: size, ..Degrees::default() })
}

pub(super) fn failed_rank(ranks: &dyn Ranks) -> Verdict {
    for degrees in large(ranks) {
        let ran = ranks.run(degrees, PATIENT, &|mesh| {
            let group = mesh.world();
            group.barrier().map_err(told)?;
            if mesh.rank() == 1 {
                return Err("on purpose".to_owned());
            }
            // Several ways to wait for the rank that is gone, of which the collective is the same on all ranks.
            let waited = match mesh.rank() % 3 {
                1 => group.recv(&[2], Kind::Float, 1).map(drop),
                _ => group.all_reduce(&number(&group, 1.0), ReduceOp::Sum).map(drop),
            };
            match waited {
                Err(Error::PeerFailed { rank: Some(1), reason }) if reason.contains("on purpose") => Ok(()),
                other => Err(format!("a wait for a failed rank gave {other:?}")),
            }
        });
        match ran {
            // The failed rank is in another process.
            Ok(()) => {}
            Err(Error::RankFailed { rank: 1, source }) if source.to_string() == "on purpose" => {}
            Err(other) => return Err(format!("with {degrees}: {other}")),
        }
    }
    Ok(())
}

pub(super) fn timeout(ranks: &dyn Ranks) -> Verdict {
    let short = ranks.short();
    for degrees in large(ranks).take(2) {
        let last = degrees.world_size() - 1;
        let ran = ranks.run(degrees, short, &|mesh| {
            let group = mesh.world();
            if mesh.rank() == last {
                thread::sleep(short * 2 + short / 2);
                return Ok(());
            }
            match group.barrier() {
                Err(Error::Timeout { op: Op::Barrier, rank, waiting_for, .. })
                    if rank == mesh.rank() && waiting_for == [last] =>
                {
                    Ok(())
                }
                // Another rank gave up first and has left.
                Err(Error::PeerFailed { rank, .. }) if mesh.rank() > 0 && rank != Some(last) => Ok(()),
                other => Err(format!("a wait for a late rank gave {other:?}")),
            }
        });
        ran.map_err(|error| format!("with {degrees}: {error}"))?;
    }
    Ok(())
}

pub(super) fn mismatch(ranks: &dyn Ranks) -> Verdict {
    if !ranks.detects_mismatch() {
        return Ok(());
    }
    let calls: [fn(&Group, bool) -> Result<()>; 4] = [
        |group, odd| if odd { group.barrier() } else { group.all_reduce(&number(group, 1.0), ReduceOp::Sum).map(drop) },
        |group, odd| {
            let own = Tensor::zeros([2, if odd { 5 } else { 6 }], (Kind::Float, group.device()));
            group.all_gather(&own, 0).map(drop)
        },
        |group, odd| {
            let kind = if odd { Kind::Double } else { Kind::Float };
            group.all_reduce(&Tensor::zeros([2], (kind, group.device())), ReduceOp::Max).map(drop)
        },
        |group, odd| group.broadcast(&number(group, 1.0), usize::from(odd)).map(drop),
    ];
    for degrees in large(ranks) {
        let last = degrees.world_size() - 1;
        for (i, call) in calls.iter().enumerate() {
            let ran = ranks.run(degrees, PATIENT, &|mesh| match call(&mesh.world(), mesh.rank() == last) {
                Err(Error::Mismatch { rank, called, other, other_called, .. })
                    if (rank == last) != (other == last) && called != other_called =>
                {
                    Ok(())
                }
                found => Err(format!("mismatch {i} gave {found:?}")),
            });
            ran.map_err(|error| format!("with {degrees}: {error}"))?;
        }
    }
    Ok(())
}
