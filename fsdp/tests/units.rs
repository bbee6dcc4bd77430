//! Units of parameters without a model, and parameters that are used twice, partly, or not at all.
#![allow(clippy::unwrap_used)]

mod model;

use std::sync::Arc;

use ferrotitan_fsdp::comm::{BoxError, DeviceMesh, Op, fake, threads};
use ferrotitan_fsdp::nn::mesh::rng::Distribution;
use ferrotitan_fsdp::nn::mesh::{Degrees, Grid, Layout, Mesh, Parts, View};
use ferrotitan_fsdp::nn::{self, Materialize, Parameter, Transform};
use ferrotitan_fsdp::tch::{self, Device, Kind, Tensor};
use ferrotitan_fsdp::{Error, Fsdp, Handle, Options, Reshard, Wire};
use model::{Training, alone, assert_close, batch, model, rank_options, sharded};
use proptest::prelude::*;

const SIDE: usize = 5;

fn shard(ranks: usize) -> Degrees {
    Degrees { dp_shard: ranks, ..Degrees::default() }
}

fn on_ranks<T: Send>(ranks: usize, body: impl Fn(DeviceMesh) -> Result<T, BoxError> + Sync) -> Vec<T> {
    threads::run(shard(ranks), &rank_options(), body).unwrap()
}

fn square(name: &str) -> Parameter {
    Parameter::new(name, &[SIDE, SIDE], Distribution::Normal { mean: 0.0, std: 0.5 })
}

fn materialize(parameters: &[&Parameter], mesh: &dyn Mesh) {
    for parameter in parameters {
        parameter.materialize(1, Kind::Double, Device::Cpu, mesh).unwrap();
    }
}

fn input(rank: usize) -> Tensor {
    Tensor::arange(10, (Kind::Double, Device::Cpu)).view([2, SIDE as i64]) / 10.0 + rank as f64
}

fn product(x: &Tensor, weight: &Parameter) -> nn::Result<Tensor> {
    Ok(x.matmul(&weight.value()?).tanh())
}

/// This rank's rows of a gradient of the whole.
fn rows(whole: &Tensor, parameter: &Parameter, mesh: &dyn Mesh) -> Tensor {
    let region = parameter.layout().local_region(mesh);
    whole.narrow(0, region.offset[0] as i64, region.shape[0] as i64)
}

fn assert_same(ours: &Tensor, theirs: &Tensor) {
    assert_eq!(ours.size(), theirs.size());
    assert!(ours.numel() == 0 || (ours - theirs).abs().max().double_value(&[]) < 1e-12, "{ours} against {theirs}");
}

/// The dense sums over the ranks of the gradients of two square weights.
fn dense(ranks: usize, forward: impl Fn(&Tensor, &Tensor, &Tensor) -> Tensor) -> [Tensor; 2] {
    let weights = ["a", "b"].map(|name| {
        let parameter = square(name);
        materialize(&[&parameter], &Grid::single());
        parameter.local().unwrap()
    });
    (0..ranks).for_each(|rank| forward(&input(rank), &weights[0], &weights[1]).sum(Kind::Double).backward());
    weights.map(|weight| weight.grad())
}

#[test]
fn a_unit_may_run_twice_and_still_reduces_once() {
    for reshard_after_forward in [Reshard::Default, Reshard::Always, Reshard::Never] {
        on_ranks(3, |mesh| {
            let [expected, _] = dense(3, |x, a, _| x.matmul(a).tanh().matmul(a).tanh());
            let handle = Handle::new(&mesh, Options { reshard_after_forward, ..Options::default() })?;
            let weight = square("a");
            let unit = handle.unit("a", [weight.clone()])?;
            materialize(&[&weight], &mesh);
            // An input with a gradient, so that both runs have a boundary.
            let x = input(mesh.rank()).set_requires_grad(true);
            let y = unit.run(&x, |x| product(x, &weight))?;
            let y = unit.run(&y, |x| product(x, &weight))?;
            y.sum(Kind::Double).backward();
            handle.finish_backward()?;
            assert_same(&weight.gradient()?.unwrap(), &rows(&expected, &weight, &mesh));
            assert_eq!(mesh.recorder().total("fsdp", Op::ReduceScatter).count, 1);
            Ok(())
        });
    }
}

#[test]
fn a_parameter_of_two_units_belongs_to_the_first() {
    // In the order of making, and in another.
    for swapped in [false, true] {
        on_ranks(2, |mesh| {
            let [a, b] = dense(2, |x, a, b| x.matmul(a).tanh().matmul(b).tanh().matmul(a).tanh());
            let handle = Handle::new(&mesh, Options::default())?;
            let (first, second) = (square("a"), square("b"));
            let mut units = vec![];
            for unit in if swapped { [1, 0] } else { [0, 1] } {
                let parameters = if unit == 0 { vec![first.clone()] } else { vec![second.clone(), first.clone()] };
                units.push(handle.unit("unit", parameters)?);
            }
            if swapped {
                units.reverse();
            }
            materialize(&[&first, &second], &mesh);
            for _ in 0..2 {
                [&first, &second].iter().try_for_each(|parameter| parameter.clear_gradient())?;
                let y = units[0].run(&input(mesh.rank()), |x| product(x, &first))?;
                let y = units[1].run(&y, |x| product(&product(x, &second)?, &first))?;
                y.sum(Kind::Double).backward();
                handle.finish_backward()?;
                assert_same(&first.gradient()?.unwrap(), &rows(&a, &first, &mesh));
                assert_same(&second.gradient()?.unwrap(), &rows(&b, &second, &mesh));
            }
            assert!(handle.stats().peak <= 2);
            assert_eq!(handle.stats().gathered, 0);
            Ok(())
        });
    }
}

#[test]
fn what_no_rank_used_has_no_gradient_and_what_one_used_has_it_everywhere() {
    on_ranks(3, |mesh| {
        let [expected, _] = dense(1, |x, a, _| x.matmul(a).tanh());
        let handle = Handle::new(&mesh, Options::default())?;
        let [used, unused, of_one] = ["b", "c", "a"].map(square);
        let unit = handle.unit("unit", [used.clone(), unused.clone(), of_one.clone()])?;
        let skipped = square("d");
        let _ = handle.unit("skipped", [skipped.clone()])?;
        materialize(&[&used, &unused, &of_one, &skipped], &mesh);
        let y = unit.run(&input(mesh.rank()), |x| {
            let y = product(x, &used)?.sum(Kind::Double);
            Ok(if mesh.rank() == 0 { y + product(x, &of_one)?.sum(Kind::Double) } else { y })
        })?;
        y.backward();
        handle.finish_backward()?;
        assert!(used.gradient()?.is_some());
        assert!(unused.gradient()?.is_none() && skipped.gradient()?.is_none());
        assert_same(&of_one.gradient()?.unwrap(), &rows(&expected, &of_one, &mesh));
        Ok(())
    });
}

#[test]
fn frozen_parameters_are_gathered_and_never_reduced() {
    on_ranks(2, |mesh| {
        let training = Training::default();
        let mut model = model(&training);
        let frozen = ["tok_embeddings", "layers.0", "norm"];
        let is_frozen = |parameter: &Parameter| frozen.iter().any(|prefix| parameter.name().starts_with(prefix));
        let parameters = model.parameters();
        parameters.iter().for_each(|parameter| parameter.set_trainable(!is_frozen(parameter)));
        let handle = Fsdp::new(&mesh, Options::default()).attach(&mut model)?;
        model.materialize(&training.how, &mesh)?;
        model.forward(&batch(&training, 0, 0..2))?.backward();
        handle.finish_backward()?;
        for parameter in &parameters {
            assert_eq!(parameter.gradient()?.is_some(), !is_frozen(parameter), "{}", parameter.name());
        }
        // Two of the four units have something to train, and the backward ends at the first of these.
        let recorder = mesh.recorder();
        assert_eq!(recorder.total("fsdp", Op::ReduceScatter).count, 2);
        assert_eq!(recorder.total("fsdp", Op::AllGather).count, 4 + 1);
        // Thawed, it takes part from the next pass on.
        parameters.iter().for_each(|parameter| parameter.set_trainable(true));
        model.forward(&batch(&training, 0, 0..2))?.backward();
        handle.finish_backward()?;
        assert!(parameters.iter().all(|parameter| parameter.gradient().unwrap().is_some()));
        Ok(())
    });
}

#[test]
fn evaluation_leaves_nothing_gathered_and_sees_what_training_changed() {
    let loss_of = |model: &mut nn::Model, training: &Training| {
        tch::no_grad(|| model.forward(&batch(training, 0, 0..2)).unwrap().double_value(&[]))
    };
    let training = Training::default();
    for reshard_after_forward in [Reshard::Default, Reshard::Always, Reshard::Never, Reshard::Ranks(2)] {
        on_ranks(4, |mesh| {
            let mut model = model(&training);
            let handle =
                Fsdp::new(&mesh, Options { reshard_after_forward, ..Options::default() }).attach(&mut model)?;
            model.materialize(&training.how, &mesh)?;
            let before = loss_of(&mut model, &training);
            assert_eq!(handle.stats().gathered, 0);
            // In the middle of a training pass too.
            let loss = model.forward(&batch(&training, 0, 0..2))?;
            assert_eq!(loss_of(&mut model, &training), before);
            loss.backward();
            handle.finish_backward()?;
            for parameter in model.parameters() {
                let gradient = parameter.gradient()?.unwrap();
                let _ = tch::no_grad(|| parameter.local().unwrap().detach().subtract_(&(gradient * 1e-3)));
            }
            let after = loss_of(&mut model, &training);
            assert!(after < before, "{after} after {before}");
            assert_eq!(handle.stats().gathered, 0);
            Ok(())
        });
    }
}

/// Sends fp64 shards as fp32.
#[derive(Debug)]
struct Narrow;

impl Wire for Narrow {
    fn kind(&self) -> Kind {
        Kind::Float
    }

    fn encode(&self, shard: &Tensor, wire: &mut Tensor) -> Result<(), BoxError> {
        wire.f_copy_(&shard.f_to_kind(Kind::Float)?)?;
        Ok(())
    }

    fn decode(&self, wire: &Tensor, value: &mut Tensor) -> Result<(), BoxError> {
        value.f_copy_(&wire.f_to_kind(Kind::Double)?)?;
        Ok(())
    }
}

#[test]
fn a_wire_is_what_travels_and_every_mesh_computes_with_what_it_gives() {
    let narrow = |parameter: &Parameter| -> Option<Arc<dyn Wire>> {
        parameter.name().ends_with("wq.weight").then(|| Arc::new(Narrow) as Arc<dyn Wire>)
    };
    let training = Training::default();
    let make = move |mesh: &DeviceMesh| Fsdp::new(mesh, Options::default()).with_wires(narrow);
    let one = sharded(&training, Degrees::default(), make);
    for degrees in [shard(3), Degrees { dp_shard: 2, dp_replicate: 2, ..Degrees::default() }] {
        assert_close(&sharded(&training, degrees, make), &one, 1e-10);
    }
    // Rounded to fp32, or not.
    let (ours, plain) = (one.losses[0], alone(&training).losses[0]);
    assert!(ours != plain && (ours - plain).abs() < 1e-6, "{ours} against {plain}");

    on_ranks(2, |mesh| {
        let mut model = model(&training);
        let handle = make(&mesh).attach(&mut model)?;
        model.materialize(&training.how, &mesh)?;
        model.forward(&batch(&training, 0, 0..2))?.backward();
        handle.finish_backward()?;
        let gathers: Vec<Kind> =
            mesh.recorder().events().iter().filter(|e| e.op == Op::AllGather).map(|event| event.kind).collect();
        // Embedding, two blocks of two dtypes, norm and head; and back.
        let mixed = Kind::Uint8;
        assert_eq!(gathers, [Kind::Double, mixed, mixed, Kind::Double, mixed, mixed, Kind::Double]);
        Ok(())
    });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    /// Whatever tensor parallelism has left of a parameter is what the sharding group divides and gathers, bit for bit.
    #[test]
    fn what_is_gathered_is_the_global_tensor(
        rows in 1_usize..9, columns in 1_usize..9, dp_shard in 1_usize..4, tp in 1_usize..3, tp_axis in 0_usize..2, replicas: bool,
    ) {
        let degrees = Degrees { dp_shard, tp, ..Degrees::default() };
        let make = || Parameter::new("w", &[rows, columns], Distribution::Normal { mean: 0.0, std: 1.0 });
        let ran = threads::run(degrees, &rank_options(), |mesh| {
            let (ours, whole) = (make(), make());
            let whole_axis = std::iter::repeat_n(0..[rows, columns][tp_axis], tp).collect();
            let parts = if replicas { Parts::At(whole_axis) } else { Parts::Even };
            let left = Layout::replicated(&[rows, columns]).shard(View::TP, tp_axis, parts)?;
            ours.set_layout(left.clone());
            let handle = Handle::new(&mesh, Options::default())?;
            let unit = handle.unit("w", [ours.clone()])?;
            materialize(&[&ours], &mesh);
            materialize(&[&whole], &Grid::single());
            let mut expected = whole.local()?;
            for (axis, range) in left.local_region(&mesh).ranges().enumerate() {
                expected = expected.narrow(axis as i64, range.start as i64, range.len() as i64);
            }
            let gathered = tch::no_grad(|| unit.run(&input(0), |_| Ok(ours.value()?.copy())))?;
            Ok::<_, BoxError>(gathered.size() == expected.size() && gathered == expected)
        });
        prop_assert!(ran.unwrap().into_iter().all(|same| same));
    }

    #[test]
    fn any_axis_may_be_divided(ranks in 2_usize..6, choice: u64) {
        let make = move |mesh: &DeviceMesh| {
            let axis = move |parameter: &Parameter| {
                let hash = parameter.name().bytes().fold(choice, |hash, byte| hash.rotate_left(5) ^ u64::from(byte));
                hash as usize % parameter.layout().shape().len()
            };
            Fsdp::new(mesh, Options::default()).with_axis(axis)
        };
        let training = Training { rows: 6, ..Training::default() };
        assert_close(&sharded(&training, shard(ranks), make), &alone(&training), 1e-10);
    }
}

#[test]
fn small_gradients_are_not_lost_in_half_precision() {
    // 1 and then 64 times 2⁻¹⁰, of which bf16 would keep none beside the 1.
    let sums = on_ranks(2, |mesh| {
        let handle = Handle::new(&mesh, Options::default())?;
        let weight = Parameter::new("w", &[4], Distribution::Constant(1.0));
        let unit = handle.unit("w", [weight.clone()])?;
        weight.materialize(0, Kind::Float, Device::Cpu, &mesh)?;
        weight.set_compute_kind(Some(Kind::BFloat16));
        handle.set_requires_reduction(false);
        for micro in 0..65 {
            let scale = if micro == 0 { 1.0 } else { (2_f64).powi(-10) };
            let x = Tensor::full([4], scale, (Kind::BFloat16, Device::Cpu));
            unit.run(&x, |x| Ok(x * weight.value()?))?.sum(Kind::Float).backward();
            handle.finish_backward()?;
        }
        handle.set_requires_reduction(true);
        handle.finish_backward()?;
        Ok(weight.gradient()?.unwrap().double_value(&[0]))
    });
    assert_eq!(sums, [2.125, 2.125]);
}

#[test]
fn half_precision_trains_like_single() {
    let how = |compute| Materialize { kind: Kind::Float, compute, ..Training::default().how };
    let training = |compute| Training { how: how(compute), ..Training::default() };
    let single = alone(&training(None));
    let half = sharded(&training(Some(Kind::BFloat16)), shard(2), |mesh| Fsdp::new(mesh, Options::default()));
    assert_close(&half, &single, 0.1);
    // Half the bits leave a trace.
    assert_ne!(half.losses, single.losses);
}

#[test]
fn mistakes_are_errors() {
    let mesh = fake::mesh(shard(4), 1, Device::Cpu).unwrap();
    let handle = Handle::new(&mesh, Options::default()).unwrap();
    assert!(matches!(handle.unit("none", []), Err(Error::Empty { .. })));
    let scalar = Parameter::new("scalar", &[], Distribution::Constant(0.0));
    let message = handle.unit("unit", [scalar]).unwrap_err().to_string();
    assert!(message.contains("scalar") && message.contains("axis"), "{message}");
    let there = square("there");
    materialize(&[&there], &mesh);
    assert!(matches!(handle.unit("unit", [there]), Err(Error::Materialized { .. })));
    let divided = square("divided");
    divided.set_layout(Layout::replicated(&[SIDE, SIDE]).shard(View::DP_SHARD, 1, Parts::Even).unwrap());
    assert!(matches!(handle.unit("unit", [divided]), Err(Error::Layout { .. })));
    assert!(matches!(handle.unshard(0), Err(Error::NoSuchUnit { unit: 0, count: 0 })));

    let early = square("early");
    let unit = handle.unit("unit", [early.clone()]).unwrap();
    let message = unit.run(&input(0), |x| product(x, &early)).unwrap_err().to_string();
    assert!(message.contains("early") && message.contains("materialize"), "{message}");
    assert_eq!(handle.name(0).unwrap(), "unit");

    let three = Options { reshard_after_forward: Reshard::Ranks(3), ..Options::default() };
    assert!(matches!(Handle::new(&mesh, three), Err(Error::Ranks { ranks: 3, size: 4 })));
    let message =
        Fsdp::new(&mesh, Options::default()).apply(&mut model(&Training::default()), &Grid::single()).unwrap_err();
    assert!(message.to_string().contains("mesh"), "{message}");
    let fsdp = Fsdp::new(&mesh, Options::default());
    fsdp.apply(&mut model(&Training::default()), &mesh).unwrap();
    assert_eq!(fsdp.handles()[0].units(), 4);
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    let error = threads::run(shard(3), &rank_options(), |mesh| {
        let training = Training::default();
        let mut model = model(&training);
        let handle = Fsdp::new(&mesh, Options::default()).attach(&mut model)?;
        model.materialize(&training.how, &mesh)?;
        let loss = model.forward(&batch(&training, 0, 0..1))?;
        if mesh.rank() == 1 {
            return Err(BoxError::from("out of memory"));
        }
        ferrotitan_ext::autograd::backward(&[loss], &[], false)?;
        Ok(handle.finish_backward()?)
    });
    let message = error.unwrap_err().to_string();
    assert!(message.contains("rank 1") && message.contains("out of memory"), "{message}");
}
