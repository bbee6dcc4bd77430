//! What does not fit is refused before anything is sent.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;

use ferrotitan_comm::mesh::Degrees;
use ferrotitan_comm::{DeviceMesh, Group, threads};
use ferrotitan_cp::{ContextOptions, ContextParallel, Mask, Method, Plan, Sharding, attention};
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{Batch, Documents, Materialize, Transform};
use tch::{Device, Kind, Tensor};

fn zeros(shape: [i64; 4]) -> Tensor {
    Tensor::zeros(shape, (Kind::Float, Device::Cpu))
}

fn refusal(q: [i64; 4], k: [i64; 4], mask: &Mask, ranks: usize) -> String {
    let sharding = Sharding::head_tail(8, ranks).unwrap();
    let group = Group::single(Device::Cpu);
    attention(&zeros(q), &zeros(k), &zeros(k), mask, &sharding, Method::Ring, &group).unwrap_err().to_string()
}

#[test]
fn shapes_that_do_not_fit() {
    let causal = Mask::causal();
    let length = refusal([1, 7, 4, 2], [1, 7, 2, 2], &causal, 1);
    assert!(length.contains("[1, 7, 4, 2]") && length.contains("[1, 8, heads, features]"), "{length}");
    assert!(refusal([1, 8, 4, 2], [1, 8, 3, 2], &causal, 1).contains("a multiple of those of the keys"));
    assert!(refusal([1, 8, 4, 2], [1, 8, 2, 4], &causal, 1).contains("keys [1, 8, 2, 4]"));
    assert!(refusal([1, 8, 4, 2], [2, 8, 2, 2], &causal, 1).contains("keys [2, 8, 2, 2]"));
    assert!(refusal([1, 8, 4, 2], [1, 8, 0, 2], &causal, 1).contains("keys [1, 8, 0, 2]"));
    assert!(refusal([1, 8, 4, 2], [1, 8, 2, 2], &causal, 2).contains("over 2 ranks for a group of 1"));
    let documents = causal.within(Documents::from_lengths(vec![vec![3, 4]]).unwrap());
    assert!(refusal([1, 8, 4, 2], [1, 8, 2, 2], &documents, 1).contains("1 sequences with 8 tokens"));
}

#[test]
fn dtypes_that_do_not_fit() {
    let (sharding, group) = (Sharding::contiguous(8, 1).unwrap(), Group::single(Device::Cpu));
    let (x, y) = (zeros([1, 8, 2, 2]), zeros([1, 8, 2, 2]).to_kind(Kind::Double));
    for method in Method::ALL {
        let message = attention(&x, &y, &x, &Mask::causal(), &sharding, method, &group).unwrap_err().to_string();
        assert!(message.contains("Float") && message.contains("Double"), "{message}");
    }
}

#[test]
fn plans_of_no_rank() {
    let sharding = Sharding::contiguous(8, 2).unwrap();
    let message = Plan::new(&Mask::causal(), &sharding, Method::Ring, 2, 1).unwrap_err().to_string();
    assert!(message.contains("rank 2") && message.contains("one of 2 ranks"), "{message}");
}

#[test]
fn batches_that_do_not_fit() {
    let mesh = DeviceMesh::single(Device::Cpu);
    let context = ContextParallel::new(&mesh, ContextOptions::default()).unwrap();
    let tokens = Tensor::zeros([2, 6], (Kind::Int64, Device::Cpu));
    let mut batch = Batch::new(tokens.shallow_clone(), Some(tokens.narrow(1, 0, 5))).unwrap();
    assert!(context.shard_batch(&batch).unwrap_err().to_string().contains("[2, 6] and [2, 5]"));
    batch.labels = None;
    batch.documents = Some(Documents::from_lengths(vec![vec![7]; 2]).unwrap());
    assert!(context.shard_batch(&batch).unwrap_err().to_string().contains("7 tokens"));
}

#[test]
fn a_model_wants_its_batch_cut() {
    let config =
        LlamaConfig { dim: 8, n_layers: 1, n_heads: 2, n_kv_heads: 1, ..LlamaConfig::flavor("debugmodel", 9).unwrap() };
    let forward = |mesh: &DeviceMesh| {
        let mut model = build(&config).unwrap();
        ContextParallel::new(mesh, ContextOptions::default()).unwrap().apply(&mut model, mesh).unwrap();
        let how = Materialize { seed: 0, kind: Kind::Float, compute: None, device: Device::Cpu };
        model.materialize(&how, mesh).unwrap();
        model.forward(&Batch::new(Tensor::zeros([1, 4], (Kind::Int64, Device::Cpu)), None).unwrap())
    };
    // A rank alone has the whole batch in any case.
    assert!(forward(&DeviceMesh::single(Device::Cpu)).is_ok());
    let degrees = Degrees { cp: 2, ..Degrees::default() };
    let messages = threads::run(degrees, &threads::Options::default(), |mesh| -> Result<_, Infallible> {
        Ok(forward(&mesh).unwrap_err().to_string())
    });
    for message in messages.unwrap() {
        assert!(
            message.contains("layer layers.0") && message.contains("give the model what `shard_batch` gives"),
            "{message}"
        );
    }
}
