//! How fast the threads backend moves and adds, beside a plain copy.
//!
//! `cargo run --release -p ferrotitan-comm --example bandwidth [RANKS] [MIB]`

use std::time::Instant;

use ferrotitan_comm::mesh::Degrees;
use ferrotitan_comm::tch::{Kind, Tensor};
use ferrotitan_comm::{Error, Group, ReduceOp, threads};

const ROUNDS: u32 = 20;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let size = arguments.next().and_then(Result::ok).unwrap_or(2);
    let mib = arguments.next().and_then(Result::ok).unwrap_or(64);
    let degrees = Degrees { dp_shard: size, ..Degrees::default() };
    let options = threads::Options { intra_op_threads: Some(1), ..threads::Options::default() };
    threads::run(degrees, &options, |mesh| {
        let group = mesh.world();
        let elements = ((mib << 18) / size * size) as i64;
        for kind in [Kind::Float, Kind::BFloat16] {
            let whole = Tensor::ones([elements], (kind, mesh.device()));
            let sizes = vec![elements as usize / size; size];
            let mut shard = whole.narrow(0, 0, elements / size as i64).copy();
            let mut full = whole.copy();
            let mut in_place = whole.copy();
            report(&group, kind, "copy of a tensor", || {
                full.copy_(&whole);
                Ok(())
            })?;
            report(&group, kind, "all-reduce in place", || group.all_reduce_(&mut in_place, ReduceOp::Max))?;
            report(&group, kind, "all-reduce", || group.all_reduce(&whole, ReduceOp::Sum).map(drop))?;
            report(&group, kind, "all-gather into", || group.all_gather_into(&mut full, &shard, 0, &sizes))?;
            report(&group, kind, "all-gather", || group.all_gather(&shard, 0).map(drop))?;
            report(&group, kind, "reduce-scatter into", || group.reduce_scatter_into(&mut shard, &whole, 0, &sizes))?;
            report(&group, kind, "reduce-scatter", || group.reduce_scatter(&whole, 0).map(drop))?;
        }
        let number = Tensor::ones([1], (Kind::Float, mesh.device()));
        report(&group, Kind::Float, "all-reduce of one number", || group.all_reduce(&number, ReduceOp::Sum).map(drop))
    })?;
    Ok(())
}

/// Times a step that all ranks take together, and prints what one took on rank 0.
fn report(group: &Group, kind: Kind, what: &str, mut step: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    step()?;
    group.barrier()?;
    let begun = Instant::now();
    for _ in 0..ROUNDS {
        step()?;
    }
    group.barrier()?;
    if group.rank() == 0 {
        eprintln!("{kind:?} {what}: {:.3} ms", begun.elapsed().as_secs_f64() * 1e3 / f64::from(ROUNDS));
    }
    Ok(())
}
