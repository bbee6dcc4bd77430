//! Two hand-written layers, sharded over two ranks that are threads of this process, learn to give their input back.

use ferrotitan_fsdp::comm::mesh::{Degrees, Mesh, rng::Distribution};
use ferrotitan_fsdp::comm::{BoxError, DeviceMesh, ReduceOp, threads};
use ferrotitan_fsdp::nn::Parameter;
use ferrotitan_fsdp::tch::{Device, Kind, Tensor, no_grad};
use ferrotitan_fsdp::{Handle, Options};

const FEATURES: usize = 16;
const ROWS: i64 = 64;

fn rank_main(mesh: DeviceMesh) -> Result<(f64, f64), BoxError> {
    let init = Distribution::Normal { mean: 0.0, std: 0.2 };
    let up = Parameter::new("up", &[2 * FEATURES, FEATURES], init);
    let down = Parameter::new("down", &[FEATURES, 2 * FEATURES], init);

    // Each layer's parameters are a unit, divided among the ranks before they have storage.
    let sharded = Handle::new(&mesh, Options::default())?;
    let first = sharded.unit("first", [up.clone()])?;
    let second = sharded.unit("second", [down.clone()])?;
    for parameter in [&up, &down] {
        parameter.materialize(0, Kind::Float, Device::Cpu, &mesh)?;
    }

    // Each rank sees rows of its own.
    let mine = Tensor::arange(ROWS * FEATURES as i64, (Kind::Float, Device::Cpu)) * (1.7 + mesh.rank() as f64);
    let x = mine.sin().view([ROWS, FEATURES as i64]);
    let mut losses = Vec::new();
    for _ in 0..60 {
        let hidden = first.run(&x, |x| Ok(x.linear(&up.value()?, None::<&Tensor>).tanh()))?;
        let y = second.run(&hidden, |h| Ok(h.linear(&down.value()?, None::<&Tensor>)))?;
        // A sum, divided once by the elements of all ranks: gradients are summed over the ranks.
        let loss = (&y - &x).square().sum(Kind::Float) / (x.numel() * mesh.world_size()) as f64;
        loss.backward();
        sharded.finish_backward()?;
        for parameter in [&up, &down] {
            let gradient = parameter.gradient()?.ok_or("every parameter is used")?;
            let _ = no_grad(|| parameter.local().map(|local| local.detach().subtract_(&(gradient * 2.0))))?;
            parameter.clear_gradient()?;
        }
        losses.push(mesh.world().all_reduce_scalar(loss.double_value(&[]), ReduceOp::Sum)?);
    }
    Ok((losses[0], losses[losses.len() - 1]))
}

#[allow(clippy::print_stdout)]
fn main() -> Result<(), BoxError> {
    let degrees = Degrees { dp_shard: 2, ..Degrees::default() };
    let losses = threads::run(degrees, &threads::Options::default(), rank_main)?;
    println!("loss {:.4} before, {:.4} after", losses[0].0, losses[0].1);
    Ok(())
}
