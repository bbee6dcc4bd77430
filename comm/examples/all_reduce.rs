//! Four ranks, as threads of one process, sum a tensor.
//!
//! `cargo run -p ferrotitan-comm --example all_reduce`

use ferrotitan_comm::mesh::{Degrees, Mesh};
use ferrotitan_comm::tch::{Kind, Tensor};
use ferrotitan_comm::{Error, ReduceOp, threads};

fn main() -> Result<(), Error> {
    let degrees = Degrees { dp_replicate: 4, ..Degrees::default() };
    let sums = threads::run(degrees, &threads::Options::default(), |mesh| {
        let own = Tensor::arange(4, (Kind::Float, mesh.device())) * (mesh.rank() as f64 + 1.0);
        let sum = mesh.world().all_reduce(&own, ReduceOp::Sum)?;
        Ok::<_, Error>(format!("rank {}: {own} summed to {sum}", mesh.rank()))
    })?;
    sums.iter().for_each(|line| eprintln!("{line}"));
    Ok(())
}
