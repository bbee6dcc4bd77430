//! Context parallelism beside sharded data parallelism and tensor parallelism.

use ferrotitan_comm::DeviceMesh;
use ferrotitan_comm::threads::run;
use ferrotitan_cp::{Balance, ContextOptions, ContextParallel, Method, Result};
use ferrotitan_fsdp::Fsdp;
use ferrotitan_mesh::Degrees;
use ferrotitan_nn::Transform;
use ferrotitan_nn::llama::build;
use ferrotitan_tp::{Plan, TensorParallel};

use crate::support::{HOW, alone, batch, checkpoint_blocks, config, limits, packed, rows};

fn on_rank(
    mesh: &DeviceMesh,
    options: ContextOptions,
    sequence_parallel: bool,
    checkpoint: bool,
) -> (ferrotitan_nn::Model, tch::Tensor) {
    let mut model = build(&config()).unwrap();
    let tensor = ferrotitan_tp::Options { sequence_parallel, ..ferrotitan_tp::Options::default() };
    TensorParallel::new(mesh.clone(), tensor, Plan::llama(&config())).apply(&mut model, mesh).unwrap();
    let context = ContextParallel::new(mesh, options).unwrap();
    context.apply(&mut model, mesh).unwrap();
    if checkpoint {
        checkpoint_blocks(&mut model);
    }
    let handle = Fsdp::new(mesh, ferrotitan_fsdp::Options::default()).attach(&mut model).unwrap();
    model.materialize(&HOW, mesh).unwrap();
    let local = context.shard_batch(&rows(&batch(packed()), mesh)).unwrap();
    let loss = model.forward(&local).unwrap();
    loss.backward();
    handle.finish_backward().unwrap();
    (model, loss)
}

fn parity(degrees: Degrees, sequence_parallel: bool, checkpoint: bool) {
    let expected = alone(&batch(packed()));
    for method in Method::ALL {
        run(degrees, &limits(), |mesh| -> Result<()> {
            let options = ContextOptions { method, balance: Balance::Documents };
            let (model, loss) = on_rank(&mesh, options, sequence_parallel, checkpoint);
            expected.assert_met(&loss, &model, &mesh, None, &format!("{method} on {degrees:?}"));
            Ok(())
        })
        .unwrap();
    }
}

const ONE: Degrees = Degrees { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 1 };

#[test]
fn sharded() {
    parity(Degrees { cp: 4, ..ONE }, true, false);
    parity(Degrees { dp_shard: 2, cp: 3, ..ONE }, true, true);
    parity(Degrees { dp_replicate: 2, cp: 2, ..ONE }, true, false);
}

#[test]
fn sharded_with_split_projections() {
    parity(Degrees { cp: 2, tp: 2, ..ONE }, true, false);
    parity(Degrees { cp: 2, tp: 2, ..ONE }, false, false);
    parity(Degrees { dp_shard: 2, cp: 2, tp: 2, ..ONE }, true, true);
}
