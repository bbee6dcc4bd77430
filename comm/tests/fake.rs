//! The fake backend: shapes and records of a mesh that is not there.

#![allow(clippy::unwrap_used, missing_docs)]

use ferrotitan_comm::mesh::{Degrees, Mesh, View};
use ferrotitan_comm::tch::{Device, Kind, Tensor};
use ferrotitan_comm::{Op, ReduceOp, fake};

fn degrees() -> Degrees {
    Degrees { pp: 4, dp_shard: 16, tp: 8, ..Degrees::default() }
}

#[test]
fn answers_in_the_shapes_of_a_real_mesh() {
    let mesh = fake::mesh(degrees(), 137, Device::Cpu).unwrap();
    assert_eq!(mesh.world_size(), 512);
    let (tp, fsdp) = (mesh.group(View::TP).unwrap(), mesh.group(View::FSDP).unwrap());
    let own = Tensor::ones([4, 6], (Kind::BFloat16, Device::Cpu));
    assert_eq!(tp.all_gather(&own, 1).unwrap().size(), [4, 48]);
    assert_eq!(fsdp.reduce_scatter(&Tensor::cat(&[&own; 8], 0), 0).unwrap().size(), [2, 6]);
    let sizes: Vec<usize> = (0..8).map(|rank| if rank == tp.rank() { 4 } else { rank }).collect();
    let uneven = tp.all_gather_uneven(&own, 0, &sizes).unwrap();
    assert_eq!(uneven.size(), [sizes.iter().sum::<usize>() as i64, 6]);
    assert_eq!(tp.all_to_all(&Tensor::ones([8, 6], (Kind::Float, Device::Cpu)), 0, 1).unwrap().size(), [1, 48]);
    assert_eq!(mesh.world().all_reduce_scalar(2.0, ReduceOp::Sum).unwrap(), 1024.0);
    assert_eq!(tp.all_reduce_scalar(2.0, ReduceOp::Max).unwrap(), 2.0);
    let pp = mesh.group(View::PP).unwrap();
    pp.send(&own, pp.rank() + 1).unwrap();
    assert_eq!(pp.recv(&[3, 5], Kind::BFloat16, 0).unwrap().size(), [3, 5]);
    mesh.world().barrier().unwrap();
}

#[test]
fn gradients_flow() {
    let mesh = fake::mesh(degrees(), 0, Device::Cpu).unwrap();
    let tp = mesh.group(View::TP).unwrap();
    let own = Tensor::ones([2], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    tp.all_gather_autograd(&own, 0, None).unwrap().sum(Kind::Double).backward();
    assert_eq!(own.grad(), Tensor::full([2], 8.0, (Kind::Double, Device::Cpu)));
    let counts = |op| mesh.recorder().total("tp", op).count;
    assert_eq!((counts(Op::AllGather), counts(Op::ReduceScatter)), (1, 1));
}
