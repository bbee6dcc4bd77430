//! Collectives that move values: gathers, exchanges, broadcasts, messages.

use tch::{Kind, Tensor};

use super::case::{Case, Draw, same};
use super::{PATIENT, Ranks, Verdict, ensure, meshes, on_worlds, reducing, told};
use crate::{Error, Group, ReduceOp};

/// How many cases a check draws for each world size.
const CASES: u64 = 24;

pub(super) fn movements(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        for seed in 0..CASES {
            let case = Case::draw(seed ^ 0x6d6f_7665, &Case::KINDS);
            let checks = [check_all_gather, check_all_to_all, check_broadcast];
            checks.iter().try_for_each(|check| check(group, &case)).map_err(|found| format!("{case:?}: {found}"))?;
        }
        Ok(())
    })
}

pub(super) fn rings(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        for seed in 0..CASES {
            let case = Case::draw(seed ^ 0x7269_6e67, &Case::KINDS);
            check_ring(group, &case).map_err(|found| format!("{case:?}: {found}"))?;
        }
        Ok(())
    })
}

/// Gathers, even and uneven, into new and given memory.
///
/// # Errors
/// What was found instead.
pub fn check_all_gather(group: &Group, case: &Case) -> Verdict {
    let (axis, sizes) = (case.axis, case.sizes(group.size()));
    let parts = ranks_values(group, case, |rank| case.shape_with(axis, sizes[rank]))?;
    let expected = Tensor::cat(&parts, axis as i64);
    let own = case.own(group, &case.shape_with(axis, sizes[group.rank()]))?;
    same(&group.all_gather_uneven(&own, axis, sizes).map_err(told)?, &expected)?;

    let mut output = expected.zeros_like().to_device(group.device());
    group.all_gather_into(&mut output, &own, axis, sizes).map_err(told)?;
    same(&output, &expected)?;

    let parts = ranks_values(group, case, |_| case.shape_with(axis, sizes[0]))?;
    let own = case.own(group, &case.shape_with(axis, sizes[0]))?;
    same(&group.all_gather(&own, axis).map_err(told)?, &Tensor::cat(&parts, axis as i64))
}

/// Exchanges, even and uneven, between two axes or along one, and back.
///
/// # Errors
/// What was found instead.
pub fn check_all_to_all(group: &Group, case: &Case) -> Verdict {
    let (size, rank) = (group.size(), group.rank());
    let (split, concat) = (case.axis, case.other_axis);
    let narrow = |tensor: &Tensor, sizes: &[usize], index: usize| {
        let offset: usize = sizes[..index].iter().sum();
        tensor.narrow(split as i64, offset as i64, sizes[index] as i64)
    };
    // What rank i sends to rank j is lengths(i)[j] long.
    let lengths = |from: usize| -> Vec<usize> {
        match split == concat {
            true => (0..size).map(|to| (case.sizes[from] + case.other_sizes[to] * from) % 4).collect(),
            false => case.sizes(size).to_vec(),
        }
    };
    let arriving: Vec<usize> = match split == concat {
        true => (0..size).map(|from| lengths(from)[rank]).collect(),
        false => case.other_sizes[..size].to_vec(),
    };
    let shape = |from: usize| {
        let mut shape = case.shape_with(split, lengths(from).iter().sum());
        if split != concat {
            shape[concat] = case.other_sizes[from] as i64;
        }
        shape
    };
    let all = ranks_values(group, case, shape)?;
    let pieces: Vec<_> = all.iter().enumerate().map(|(from, tensor)| narrow(tensor, &lengths(from), rank)).collect();
    let own = case.own(group, &shape(rank))?;
    let got = group.all_to_all_uneven(&own, split, concat, &lengths(rank), &arriving).map_err(told)?;
    same(&got, &Tensor::cat(&pieces, concat as i64))?;
    let back = group.all_to_all_uneven(&got, concat, split, &arriving, &lengths(rank)).map_err(told)?;
    same(&back, &own)?;

    let shape = case.shape_with(split, size * case.sizes[0]);
    let all = ranks_values(group, case, |_| shape.clone())?;
    let even = vec![case.sizes[0]; size];
    let pieces: Vec<_> = all.iter().map(|tensor| narrow(tensor, &even, rank)).collect();
    let own = case.own(group, &shape)?;
    let got = group.all_to_all(&own, split, concat).map_err(told)?;
    same(&got, &Tensor::cat(&pieces, concat as i64))?;
    same(&group.all_to_all(&got, concat, split).map_err(told)?, &own)
}

/// Broadcasts from every rank, to new memory and in place.
///
/// # Errors
/// What was found instead.
pub fn check_broadcast(group: &Group, case: &Case) -> Verdict {
    let shape = case.shape_with(case.axis, case.sizes[0]);
    for root in 0..group.size() {
        let expected = case.values(group.ranks()[root], &shape)?;
        let mut own = case.own(group, &shape)?;
        same(&group.broadcast(&own, root).map_err(told)?, &expected)?;
        group.broadcast_(&mut own, root).map_err(told)?;
        same(&own, &expected)?;
    }
    Ok(())
}

/// Several messages to the next rank before any is received from the one before, at once and pending, which arrive in
/// order although their tensors have been changed meanwhile.
///
/// # Errors
/// What was found instead.
pub fn check_ring(group: &Group, case: &Case) -> Verdict {
    let (size, rank) = (group.size(), group.rank());
    if size == 1 {
        return Ok(());
    }
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let shape = |message: usize| case.shape_with(case.axis, case.sizes[message]);
    let values = |message: usize, from: usize| {
        let case = Case { seed: case.seed ^ message as u64, ..case.clone() };
        case.values(group.ranks()[from], &shape(message))
    };
    let early = group.recv_start(&shape(0), case.kind, before).map_err(told)?;
    for message in 0..3 {
        let mut own = values(message, rank)?.to_device(group.device());
        group.send(&own, next).map_err(told)?;
        let _ = own.f_zero_().map_err(told)?;
    }
    let kept = values(3, rank)?.to_device(group.device());
    let sent = group.send_start(&kept, next).map_err(told)?;
    let second = group.recv(&shape(1), case.kind, before).map_err(told)?;
    same(&early.wait().map_err(told)?, &values(0, before)?)?;
    same(&second, &values(1, before)?)?;
    for message in 2..4 {
        same(&group.recv(&shape(message), case.kind, before).map_err(told)?, &values(message, before)?)?;
    }
    sent.wait().map_err(told)
}

pub(super) fn values(ranks: &dyn Ranks) -> Verdict {
    on_worlds(ranks, |group| {
        let (size, rank) = (group.size(), group.rank());
        let sum = group.all_reduce_scalar(0.1 * (rank + 1) as f64, ReduceOp::Sum).map_err(told)?;
        let expected = 0.1 * (size * (size + 1) / 2) as f64;
        ensure((sum - expected).abs() < 1e-12, || format!("the sum is {sum} instead of {expected}"))?;
        let both = group.all_reduce_scalars(&[rank as f64, -(rank as f64)], ReduceOp::Max).map_err(told)?;
        ensure(both == [(size - 1) as f64, 0.0], || format!("the largest are {both:?}"))?;

        let bytes = |rank: usize| (0..rank * 3).map(|i| (i * 7 + rank) as u8).collect::<Vec<_>>();
        let all = group.all_gather_bytes(&bytes(rank)).map_err(told)?;
        ensure(all == (0..size).map(bytes).collect::<Vec<_>>(), || format!("gathered {all:?}"))?;

        let fine = group.all_ok(Ok::<_, String>(rank)).map_err(told)?;
        ensure(fine == rank, || format!("agreement gave {fine}"))?;
        let last = size - 1;
        let mine = if rank == last { Err("out of paper") } else { Ok(()) };
        match group.all_ok(mine) {
            Err(Error::RankFailed { source, .. }) if rank == last && source.to_string() == "out of paper" => {}
            Err(Error::PeerFailed { rank: Some(failed), reason })
                if rank != last && failed == group.ranks()[last] && reason == "out of paper" => {}
            other => return Err(format!("disagreement gave {other:?}")),
        }
        group.barrier().map_err(told)
    })
}

pub(super) fn subgroups(ranks: &dyn Ranks) -> Verdict {
    for size in ranks.sizes() {
        for (degrees, views) in meshes(size) {
            let ran = ranks.run(degrees, PATIENT, &|mesh| {
                for (seed, &view) in views.iter().enumerate() {
                    let group = mesh.group(view).map_err(told)?;
                    let place = (group.size(), group.rank(), group.ranks().to_vec());
                    use ferrotitan_mesh::Mesh;
                    let expected = (mesh.size(view), mesh.index(view), mesh.ranks(view));
                    ensure(place == expected, || format!("{view} is {place:?} instead of {expected:?}"))?;
                    for seed in 0..4 + seed as u64 {
                        let case = Case::draw(seed ^ 0x7375_6267, &Case::NUMBERS);
                        let checks = [check_all_gather, check_all_to_all, check_ring, reducing::check_reduce_scatter];
                        let checked = checks.iter().try_for_each(|check| check(&group, &case));
                        checked.map_err(|found| format!("{view}, {case:?}: {found}"))?;
                    }
                }
                Ok(())
            });
            ran.map_err(|error| format!("on {degrees}: {error}"))?;
        }
    }
    Ok(())
}

/// What every rank of the group holds.
pub(super) fn ranks_values(
    group: &Group,
    case: &Case,
    shape: impl Fn(usize) -> Vec<i64>,
) -> Result<Vec<Tensor>, String> {
    group.ranks().iter().enumerate().map(|(index, &rank)| case.values(rank, &shape(index))).collect()
}

/// A tensor of one number.
pub(super) fn number(group: &Group, value: f64) -> Tensor {
    Tensor::from_slice(&[value]).to_kind(Kind::Double).to_device(group.device())
}

/// A draw that differs from rank to rank.
pub(super) fn own_draw(group: &Group, seed: u64) -> Draw {
    Draw::new(seed.wrapping_mul(31).wrapping_add(group.rank() as u64))
}
