//! The fused kernel against the formula in fp64.
#![allow(clippy::unwrap_used)]

use ferrotitan_ext::Error;
use ferrotitan_ext::optim::{AdamwStep, fused_adamw};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

/// One parameter element and its two moments.
#[derive(Clone, Copy)]
struct Element {
    p: f64,
    m: f64,
    v: f64,
}

fn formula(step: &AdamwStep, t: i32, element: &mut Element, grad: f64) {
    let grad = if step.maximize { -grad } else { grad };
    element.p -= step.lr * step.weight_decay * element.p;
    element.m = step.beta1 * element.m + (1.0 - step.beta1) * grad;
    element.v = step.beta2 * element.v + (1.0 - step.beta2) * grad * grad;
    let (m, v) = (element.m / (1.0 - step.beta1.powi(t)), element.v / (1.0 - step.beta2.powi(t)));
    element.p -= step.lr * m / (v.sqrt() + step.eps);
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).detach().view([-1])).unwrap()
}

const STEP: AdamwStep = AdamwStep { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, maximize: false };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn equals_the_formula(
        shapes in prop::collection::vec(prop::collection::vec(0i64..6, 0..3), 1..4),
        lr in 1e-4..0.1f64,
        beta1 in 0.0..0.99f64,
        weight_decay in 0.0..0.5f64,
        maximize in any::<bool>(),
        double in any::<bool>(),
    ) {
        tch::set_num_threads(1);
        let (kind, tolerance) = if double { (Kind::Double, 1e-12) } else { (Kind::Float, 2e-5) };
        let step = AdamwStep { lr, beta1, weight_decay, maximize, ..STEP };
        let options = (kind, Device::Cpu);
        let random = || -> Vec<Tensor> { shapes.iter().map(|shape| Tensor::randn(shape, options)).collect() };
        let params: Vec<Tensor> = random().into_iter().map(|param| param.set_requires_grad(true)).collect();
        let zeros = || -> Vec<Tensor> { params.iter().map(|param| param.detach().zeros_like()).collect() };
        let (exp_avgs, exp_avg_sqs) = (zeros(), zeros());
        let steps: Vec<Tensor> = params.iter().map(|_| Tensor::zeros([], (Kind::Float, Device::Cpu))).collect();
        let mut want: Vec<Vec<Element>> =
            params.iter().map(|param| values(param).iter().map(|&p| Element { p, m: 0.0, v: 0.0 }).collect()).collect();
        for t in 1..=4 {
            let grads = random();
            steps.iter().for_each(|step| { let _ = step.shallow_clone().g_add_scalar_(1.0); });
            fused_adamw(&step, &params, &grads, &exp_avgs, &exp_avg_sqs, &steps).unwrap();
            for (index, want) in want.iter_mut().enumerate() {
                let grads = values(&grads[index]);
                want.iter_mut().zip(&grads).for_each(|(element, &grad)| formula(&step, t, element, grad));
                let moments = values(&exp_avgs[index]).into_iter().zip(values(&exp_avg_sqs[index]));
                let got = values(&params[index]).into_iter().zip(moments);
                for ((p, (m, v)), element) in got.zip(want.iter()) {
                    prop_assert!((p - element.p).abs() < tolerance * (1.0 + element.p.abs()), "{} {}", p, element.p);
                    prop_assert!((m - element.m).abs() < tolerance * (1.0 + element.m.abs()));
                    prop_assert!((v - element.v).abs() < tolerance * (1.0 + element.v.abs()));
                }
            }
        }
        prop_assert!(params.iter().all(|param| param.requires_grad() && param.is_leaf()));
    }
}

#[test]
fn lists_that_do_not_match_are_refused() {
    let ones = |shape: &[i64], kind| Tensor::ones(shape, (kind, Device::Cpu));
    let good = [ones(&[2, 3], Kind::Float)];
    let steps = [ones(&[], Kind::Float)];
    for bad in [
        vec![],
        vec![ones(&[3, 2], Kind::Float)],
        vec![ones(&[2, 3], Kind::Double)],
        vec![ones(&[3, 2], Kind::Float).tr()],
        vec![Tensor::new()],
    ] {
        for place in 0..3 {
            let list = |index| if index == place { bad.as_slice() } else { good.as_slice() };
            let error = fused_adamw(&STEP, &good, list(0), list(1), list(2), &steps).unwrap_err();
            assert!(matches!(error, Error::Argument { .. }), "{error}");
        }
    }
    for bad in [vec![], vec![ones(&[], Kind::Double)], vec![ones(&[2], Kind::Float)]] {
        let error = fused_adamw(&STEP, &good, &good, &good, &good, &bad).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error}");
    }
    let integers = [ones(&[2, 3], Kind::Int64)];
    assert!(matches!(fused_adamw(&STEP, &integers, &integers, &integers, &integers, &steps), Err(Error::Torch { .. })));
    assert_eq!(values(&good[0]), [1.0; 6]);
    fused_adamw(&STEP, &[], &[], &[], &[], &[]).unwrap();
}
