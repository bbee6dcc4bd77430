//! AdamW and the gradient norm against their formulas, on one rank and on many.
#![allow(clippy::unwrap_used)]

use ferrotitan_comm::mesh::rng::Distribution;
use ferrotitan_comm::mesh::{Degrees, Layout, Mesh, Parts, View};
use ferrotitan_comm::{DeviceMesh, threads};
use ferrotitan_nn::Parameter;
use ferrotitan_optim::{AdamW, AdamWOptions, Error, GroupOptions, NormKind, clip_gradients, gradient_norm};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const NORMAL: Distribution = Distribution::Normal { mean: 0.0, std: 1.0 };

fn parameter(name: &str, shape: &[usize], kind: Kind, mesh: &DeviceMesh) -> Parameter {
    let parameter = Parameter::new(name, shape, NORMAL);
    parameter.materialize(1, kind, Device::Cpu, mesh).unwrap();
    parameter
}

/// A gradient that is the same part of one global tensor on every rank.
fn give_gradient(parameter: &Parameter, seed: u64, kind: Kind, mesh: &dyn Mesh) {
    let source = Parameter::new(format!("{}.grad", parameter.name()), parameter.layout().shape(), NORMAL);
    source.set_layout(parameter.layout());
    source.materialize(seed, kind, Device::Cpu, mesh).unwrap();
    parameter.set_gradient(source.local().unwrap().detach()).unwrap();
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.detach().to_kind(Kind::Double).reshape([-1]).try_into().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn adamw_is_its_formula(
        lr in 1e-5..1e-1_f64, beta1 in 0.0..0.99_f64, beta2 in 0.5..0.999_f64, weight_decay in 0.0..0.5_f64, steps in 1_i32..5,
    ) {
        let mesh = DeviceMesh::single(Device::Cpu);
        let weight = parameter("w", &[3, 5], Kind::Double, &mesh);
        let options = AdamWOptions { lr, beta1, beta2, eps: 1e-8, weight_decay };
        let mut adamw = AdamW::new(vec![weight.clone()], options, &[]).unwrap();
        let mut expected = values(&weight.local().unwrap());
        let (mut means, mut squares) = (vec![0.0; 15], vec![0.0; 15]);
        for step in 1..=steps {
            give_gradient(&weight, step as u64, Kind::Double, &mesh);
            let gradient = values(&weight.gradient().unwrap().unwrap());
            adamw.step(0.5).unwrap();
            for (i, g) in gradient.iter().enumerate() {
                means[i] = beta1 * means[i] + (1.0 - beta1) * g;
                squares[i] = beta2 * squares[i] + (1.0 - beta2) * g * g;
                let mean = means[i] / (1.0 - beta1.powi(step));
                let square: f64 = squares[i] / (1.0 - beta2.powi(step));
                expected[i] -= 0.5 * lr * (weight_decay * expected[i] + mean / (square.sqrt() + 1e-8));
            }
        }
        for (ours, expected) in values(&weight.local().unwrap()).iter().zip(&expected) {
            prop_assert!((ours - expected).abs() < 1e-9, "{ours} {expected}");
        }
    }

    #[test]
    fn every_layout_has_the_same_norm_and_the_same_step(
        rows in 1_usize..9, columns in 1_usize..9, dp_replicate in 1_usize..3, dp_shard in 1_usize..4, tp in 1_usize..3, max in 0.1..5.0_f64,
    ) {
        let degrees = Degrees { dp_replicate, dp_shard, tp, ..Degrees::default() };
        let run = |degrees: Degrees| {
            threads::run(degrees, &threads::Options::default(), |mesh| -> Result<_, Error> {
                let table = Parameter::new("table", &[rows, columns], NORMAL);
                let split = Layout::replicated(&[rows, columns]).shard(View::TP, 1, Parts::Even)
                    .and_then(|layout| layout.shard(View::FSDP, 0, Parts::Even)).unwrap();
                table.set_layout(split);
                let bias = Parameter::new("bias", &[columns], NORMAL);
                let both = vec![table, bias];
                for (seed, parameter) in both.iter().enumerate() {
                    parameter.materialize(1, Kind::Double, Device::Cpu, &mesh)?;
                    give_gradient(parameter, seed as u64, Kind::Double, &mesh);
                }
                let norms = [NormKind::Two, NormKind::Infinity].map(|kind| gradient_norm(&both, kind, &mesh).unwrap());
                clip_gradients(&both, norms[0], max)?;
                AdamW::new(both.clone(), AdamWOptions::default(), &[])?.step(1.0)?;
                let region = both[0].layout().local_region(&mesh);
                Ok((norms, region, values(&both[0].local()?), values(&both[1].local()?)))
            }).unwrap()
        };
        let single = run(Degrees::default()).remove(0);
        for (norms, region, table, bias) in run(degrees) {
            prop_assert!((norms[0] - single.0[0]).abs() < 1e-12 * single.0[0]);
            prop_assert_eq!(norms[1], single.0[1]);
            prop_assert_eq!(&bias.len(), &single.3.len());
            let whole = Tensor::from_slice(&single.2).view([rows as i64, columns as i64]);
            let part = whole.narrow(0, region.offset[0] as i64, region.shape[0] as i64)
                .narrow(1, region.offset[1] as i64, region.shape[1] as i64);
            let pairs = table.iter().zip(values(&part)).chain(bias.iter().zip(single.3.iter().copied()));
            for (ours, expected) in pairs {
                prop_assert!((ours - expected).abs() < 1e-12);
            }
        }
    }
}

#[test]
fn norms_of_many_elements_lose_nothing() {
    let mesh = DeviceMesh::single(Device::Cpu);
    let weight = Parameter::new("w", &[8_000_000], Distribution::Constant(0.0));
    weight.materialize(0, Kind::Float, Device::Cpu, &mesh).unwrap();
    give_gradient(&weight, 3, Kind::Float, &mesh);
    let exact =
        weight.gradient().unwrap().unwrap().to_kind(Kind::Double).square().sum(Kind::Double).sqrt().double_value(&[]);
    let norm = gradient_norm(&[weight], NormKind::Two, &mesh).unwrap();
    assert!((norm / exact - 1.0).abs() < 1e-7, "{norm} {exact}");
}

#[test]
fn clipping_scales_to_the_limit_and_leaves_small_gradients_alone() {
    let mesh = DeviceMesh::single(Device::Cpu);
    let weight = parameter("w", &[10], Kind::Double, &mesh);
    give_gradient(&weight, 1, Kind::Double, &mesh);
    let all = [weight];
    let norm = gradient_norm(&all, NormKind::Two, &mesh).unwrap();
    assert_eq!(clip_gradients(&all, norm, 2.0 * norm).unwrap(), 1.0);
    assert_eq!(gradient_norm(&all, NormKind::Two, &mesh).unwrap(), norm);
    clip_gradients(&all, norm, 0.5 * norm).unwrap();
    assert!((gradient_norm(&all, NormKind::Two, &mesh).unwrap() / norm - 0.5).abs() < 1e-5);
}

#[test]
fn groups_have_settings_of_their_own() {
    let mesh = DeviceMesh::single(Device::Cpu);
    let names = ["layers.0.attention.wq.weight", "layers.0.attention_norm.weight", "norm.weight", "output.weight"];
    let parameters: Vec<_> = names.iter().map(|name| parameter(name, &[2], Kind::Double, &mesh)).collect();
    parameters[3].set_trainable(false);
    let before: Vec<_> = parameters.iter().map(|p| values(&p.local().unwrap())).collect();
    let still = AdamWOptions { lr: 0.0, ..AdamWOptions::default() };
    let groups = [GroupOptions { pattern: "*norm.weight".into(), options: still }];
    let mut adamw = AdamW::new(parameters.clone(), AdamWOptions::default(), &groups).unwrap();
    // The first has no gradient, hence no update, in the first step.
    parameters[1..3].iter().for_each(|p| give_gradient(p, 1, Kind::Double, &mesh));
    adamw.step(1.0).unwrap();
    let after = |i: usize| values(&parameters[i].local().unwrap());
    assert_eq!((after(0), after(1), after(2)), (before[0].clone(), before[1].clone(), before[2].clone()));
    give_gradient(&parameters[0], 1, Kind::Double, &mesh);
    adamw.step(1.0).unwrap();
    assert_ne!(after(0), before[0]);
    assert_eq!(after(1), before[1]);
    assert_eq!(adamw.state().count(), 3, "a frozen parameter has no moments");
    adamw.clear_gradients().unwrap();
    assert!(parameters[0].gradient().unwrap().is_none());
}

#[test]
fn mistakes_are_errors() {
    let mesh = DeviceMesh::single(Device::Cpu);
    let all = vec![parameter("output.weight", &[2], Kind::Double, &mesh)];
    let group = |pattern: &str| [GroupOptions { pattern: pattern.into(), options: AdamWOptions::default() }];
    let error = AdamW::new(all.clone(), AdamWOptions::default(), &group("head.*")).unwrap_err();
    assert!(error.to_string().contains("head.*") && error.to_string().contains("output.weight"), "{error}");
    assert!(matches!(AdamW::new(all.clone(), AdamWOptions::default(), &group("[")), Err(Error::Pattern { .. })));
    for bad in [
        AdamWOptions { lr: f64::NAN, ..AdamWOptions::default() },
        AdamWOptions { beta1: 1.0, ..AdamWOptions::default() },
        AdamWOptions { eps: -1.0, ..AdamWOptions::default() },
    ] {
        assert!(matches!(AdamW::new(all.clone(), bad, &[]), Err(Error::Range { .. })));
    }
    let unborn = Parameter::new("w", &[2], NORMAL);
    assert!(AdamW::new(vec![unborn], AdamWOptions::default(), &[]).is_err());
}
