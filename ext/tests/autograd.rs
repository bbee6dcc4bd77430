//! Functions written in Rust against libtorch's own gradients, and every way in which they can fail.
#![allow(clippy::unwrap_used)]

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_ext::{BoxError, Error};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn leaf(shape: &[i64]) -> Tensor {
    tch::set_num_threads(1);
    Tensor::randn(shape, F64).set_requires_grad(true)
}

fn distance(left: &Tensor, right: &Tensor) -> f64 {
    assert_eq!(left.size(), right.size());
    (left - right).abs().max().double_value(&[])
}

/// Counts how many of it were dropped.
struct Drops(Arc<AtomicUsize>);

impl Drop for Drops {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// y = x·w and z = x², with an integer output beside them.
struct Product {
    scale: f64,
    _drops: Option<Drops>,
}

impl Function for Product {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        let [x, w] = inputs else { return Err("two inputs".into()) };
        assert!(context.saved().is_err(), "saved tensors are for the backward");
        let y = x.matmul(w) * self.scale;
        assert!(!y.requires_grad(), "forward runs with tracking off");
        context.save(&[x.shallow_clone()]);
        context.save(&[w.shallow_clone()]);
        Ok(vec![y, x.square(), x.argmax(0, false)])
    }

    fn backward(&mut self, context: &mut Context, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> {
        let saved = context.saved()?;
        let (x, w) = (&saved[0], &saved[1]);
        let from_y = grads[0].as_ref().map(|grad| grad.matmul(&w.tr()) * self.scale);
        let from_z = grads[1].as_ref().map(|grad| grad * x * 2.0);
        assert!(grads[2].is_none(), "an integer output has no gradient");
        let grad_x = match (from_y, from_z) {
            (Some(y), Some(z)) => Some(y + z),
            (y, z) => y.or(z),
        };
        let grad_w = match &grads[0] {
            Some(grad) if context.needs_input_grad(1) => Some(x.tr().matmul(grad) * self.scale),
            _ => None,
        };
        assert!(!context.needs_input_grad(2));
        Ok(vec![grad_x, grad_w])
    }
}

fn product(x: &Tensor, w: &Tensor) -> Vec<Tensor> {
    autograd::apply(Product { scale: 3.0, _drops: None }, &[x, w]).unwrap()
}

/// A function made of closures.
struct Closures<F, B> {
    forward: F,
    backward: B,
}

impl<F, B> Function for Closures<F, B>
where
    F: FnMut(&mut Context, &[Tensor]) -> Result<Vec<Tensor>, BoxError> + Send + 'static,
    B: FnMut(&mut Context, Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> + Send + 'static,
{
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        (self.forward)(context, inputs)
    }

    fn backward(&mut self, context: &mut Context, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> {
        (self.backward)(context, grads)
    }
}

fn closures<F, B>(forward: F, backward: B) -> Closures<F, B>
where
    F: FnMut(&mut Context, &[Tensor]) -> Result<Vec<Tensor>, BoxError> + Send + 'static,
    B: FnMut(&mut Context, Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> + Send + 'static,
{
    Closures { forward, backward }
}

/// Doubles its input; the backward is given.
fn double(
    x: &Tensor,
    backward: impl FnMut(&mut Context, Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> + Send + 'static,
) -> Tensor {
    autograd::apply(closures(|_, inputs| Ok(vec![&inputs[0] * 2.0]), backward), &[x]).unwrap().remove(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn gradients_equal_libtorchs(
        rows in 1i64..5,
        inner in 1i64..5,
        columns in 1i64..5,
        uses in 1usize..4,
        with_z in any::<bool>(),
    ) {
        let (x, w) = (leaf(&[rows, inner]), leaf(&[inner, columns]));
        // One tensor goes through several nodes of the function.
        let mut loss = Tensor::zeros([], F64);
        let mut want = Tensor::zeros([], F64);
        let (ours, theirs) = (&x * 0.5, &x * 0.5);
        for _ in 0..uses {
            let out = product(&ours, &w);
            loss += out[0].sin().sum(Kind::Double);
            want += (theirs.matmul(&w) * 3.0).sin().sum(Kind::Double);
            if with_z {
                loss += (&out[1] * &ours).sum(Kind::Double);
                want += (theirs.square() * &theirs).sum(Kind::Double);
            }
        }
        prop_assert!(distance(&loss, &want) < 1e-12);
        let inputs = [x.shallow_clone(), w.shallow_clone()];
        let want = autograd::grad(&[want], &inputs, &[], false, false).unwrap();
        autograd::backward(&[loss], &[], false).unwrap();
        prop_assert!(distance(&x.grad(), want[0].as_ref().unwrap()) < 1e-12);
        prop_assert!(distance(&w.grad(), want[1].as_ref().unwrap()) < 1e-12);
    }
}

#[test]
fn integer_outputs_have_no_gradient() {
    let (x, w) = (leaf(&[3, 2]), leaf(&[2, 2]));
    let out = product(&x, &w);
    assert!(out[0].requires_grad() && out[1].requires_grad() && !out[2].requires_grad());
    assert_eq!(out[2].kind(), Kind::Int64);
}

#[test]
fn an_input_without_gradient_needs_none() {
    let (x, w) = (leaf(&[3, 2]), leaf(&[2, 2]).set_requires_grad(false));
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    let function = closures(
        |context, inputs| {
            assert!(context.needs_input_grad(0) && !context.needs_input_grad(1) && !context.needs_input_grad(9));
            Ok(vec![inputs[0].matmul(&inputs[1])])
        },
        move |context, grads| {
            assert!(context.needs_input_grad(0) && !context.needs_input_grad(1) && !context.needs_input_grad(9));
            count.fetch_add(1, Ordering::SeqCst);
            Ok(vec![grads[0].as_ref().map(|grad| grad.matmul(&Tensor::ones([2, 2], F64))), None])
        },
    );
    let out = autograd::apply(function, &[&x, &w]).unwrap();
    autograd::backward(&[out[0].sum(Kind::Double)], &[], false).unwrap();
    assert_eq!(seen.load(Ordering::SeqCst), 1);
    assert!(distance(&x.grad(), &Tensor::full([3, 2], 2.0, F64)) < 1e-12);
}

#[test]
fn undefined_gradients_can_be_materialized() {
    let x = leaf(&[2]);
    for materialize in [false, true] {
        let function = closures(
            move |context, inputs| {
                context.set_materialize_grads(materialize);
                Ok(vec![inputs[0].shallow_clone() * 1.0, inputs[0].shallow_clone() * 2.0])
            },
            move |_, grads| {
                assert_eq!(grads[1].is_some(), materialize);
                if let Some(grad) = &grads[1] {
                    assert_eq!(grad.abs().sum(Kind::Double).double_value(&[]), 0.0);
                }
                Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone)])
            },
        );
        let out = autograd::apply(function, &[&x]).unwrap();
        autograd::backward(&[out[0].sum(Kind::Double)], &[], false).unwrap();
    }
    assert!(distance(&x.grad(), &Tensor::full([2], 2.0, F64)) < 1e-12);
}

#[test]
fn an_output_may_be_an_input() {
    // As where a layer's input is shared out and its gradient summed over ranks.
    let x = leaf(&[3]);
    let y = &x * 2.0;
    let pass = |input: &Tensor| {
        let function = closures(
            |_, inputs| Ok(vec![inputs[0].shallow_clone()]),
            |_, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * 10.0)]),
        );
        autograd::apply(function, &[input]).unwrap().remove(0)
    };
    let (from_leaf, from_node) = (pass(&x), pass(&y));
    assert!(!from_leaf.is_leaf() && from_node.equal(&y));
    autograd::backward(&[(from_leaf + from_node + &y).sum(Kind::Double)], &[], false).unwrap();
    assert!(distance(&x.grad(), &Tensor::full([3], 32.0, F64)) < 1e-12);
}

#[test]
fn nothing_is_recorded_without_need() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let apply = |x: &Tensor, w: &Tensor| {
        let function = Product { scale: 1.0, _drops: Some(Drops(Arc::clone(&dropped))) };
        autograd::apply(function, &[x, w]).unwrap().remove(0)
    };
    let plain = apply(&leaf(&[2, 2]).set_requires_grad(false), &leaf(&[2, 2]).set_requires_grad(false));
    assert!(!plain.requires_grad());
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    let untracked = tch::no_grad(|| apply(&leaf(&[2, 2]), &leaf(&[2, 2])));
    assert!(!untracked.requires_grad());
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
}

#[test]
fn the_function_is_dropped_with_its_node() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let (x, w) = (leaf(&[2, 2]), leaf(&[2, 2]));
    let function = Product { scale: 1.0, _drops: Some(Drops(Arc::clone(&dropped))) };
    let loss = autograd::apply(function, &[&x, &w]).unwrap().remove(0).sum(Kind::Double);
    autograd::backward(&[loss.shallow_clone()], &[], true).unwrap();
    assert_eq!(dropped.load(Ordering::SeqCst), 0);
    drop(loss);
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    // After errors and panics as well.
    for fail in 0..4 {
        let guard = Drops(Arc::clone(&dropped));
        let function = closures(
            move |_, inputs| match fail {
                0 => Err("no".into()),
                1 => panic!("no"),
                _ => Ok(vec![&inputs[0] * 1.0]),
            },
            move |_, _| {
                let _held = &guard;
                if fail == 2 { Err("no".into()) } else { panic!("no") }
            },
        );
        match autograd::apply(function, &[&x]) {
            Err(_) => assert!(fail < 2),
            Ok(out) => assert!(autograd::backward(&[out[0].sum(Kind::Double)], &[], false).is_err()),
        }
        assert_eq!(dropped.load(Ordering::SeqCst), 2 + fail);
    }
}

#[test]
fn a_changed_or_freed_tensor_is_noticed() {
    let (x, w) = (leaf(&[2, 2]), leaf(&[2, 2]));
    let out = product(&x, &w).remove(0).sum(Kind::Double);
    let _ = tch::no_grad(|| w.shallow_clone().fill_(1.0));
    let error = autograd::backward(&[out], &[], false).unwrap_err();
    assert!(
        matches!(&error, Error::Torch { message, .. } if message.contains("modified by an inplace operation")),
        "{error}"
    );

    let out = product(&x, &w).remove(0).sum(Kind::Double);
    autograd::backward(&[out.shallow_clone()], &[], true).unwrap();
    autograd::backward(&[out.shallow_clone()], &[], false).unwrap();
    let error = autograd::backward(&[out], &[], false).unwrap_err();
    assert!(matches!(&error, Error::Torch { message, .. } if message.contains("second time")), "{error}");
}

#[derive(Debug, thiserror::Error)]
#[error("number {0}")]
struct Numbered(u32);

#[test]
fn errors_come_out_as_they_went_in() {
    let x = leaf(&[2]);
    let forward = closures(|_, _| Err(Numbered(1).into()), |_, _| Ok(vec![]));
    let error = autograd::apply(forward, &[&x]).unwrap_err();
    assert!(
        matches!(&error, Error::Callback { source } if source.downcast_ref::<Numbered>().unwrap().0 == 1),
        "{error}"
    );
    assert_eq!(error.to_string(), "number 1");
    assert!(error.source().is_none());

    // Below other nodes, so that it crosses the engine.
    let out = double(&(&x * 2.0), |_, _| Err(Numbered(2).into())).exp().sum(Kind::Double);
    let error = autograd::backward(&[out.shallow_clone()], &[], true).unwrap_err();
    assert!(
        matches!(&error, Error::Callback { source } if source.downcast_ref::<Numbered>().unwrap().0 == 2),
        "{error}"
    );
    let error = autograd::grad(&[out.shallow_clone()], &[x.shallow_clone()], &[], true, false).unwrap_err();
    assert!(
        matches!(&error, Error::Callback { source } if source.downcast_ref::<Numbered>().unwrap().0 == 2),
        "{error}"
    );
    // Through another binding the message remains.
    assert!(out.f_backward().unwrap_err().to_string().contains("number 2"));
    // The thread is as good as before.
    autograd::backward(&[(&x * 2.0).sum(Kind::Double)], &[], false).unwrap();
}

#[test]
fn panics_become_errors() {
    let x = leaf(&[2]);
    let function = closures(|_, _| panic!("forward {}", 1), |_, _| Ok(vec![]));
    let error = autograd::apply(function, &[&x]).unwrap_err();
    assert!(matches!(&error, Error::Panicked { message } if message == "forward 1"), "{error}");
    let out = double(&x, |_, _| panic!("backward")).sum(Kind::Double);
    let error = autograd::backward(&[out], &[], false).unwrap_err();
    assert!(matches!(&error, Error::Panicked { message } if message == "backward"), "{error}");
    // A failing call of tch is a panic too.
    let out = double(&x, |_, grads| Ok(vec![Some(grads[0].as_ref().unwrap().view([7]))])).sum(Kind::Double);
    assert!(matches!(autograd::backward(&[out], &[], false), Err(Error::Panicked { .. })));
    assert!(autograd::with_grad_mode(true, || (&x * 1.0).requires_grad()));
}

#[test]
fn wrong_results_are_refused() {
    let x = leaf(&[2]);
    let error = autograd::backward(&[double(&x, |_, _| Ok(vec![])).sum(Kind::Double)], &[], false).unwrap_err();
    assert!(
        matches!(&error, Error::Argument { message, .. } if message.contains("0 gradients for 1 inputs")),
        "{error}"
    );
    let grad_of_other_shape = double(&x, |_, _| Ok(vec![Some(Tensor::ones([3], F64))])).sum(Kind::Double);
    assert!(matches!(autograd::backward(&[grad_of_other_shape], &[], false), Err(Error::Torch { .. })));
    let undefined = closures(|_, _| Ok(vec![Tensor::new()]), |_, _| Ok(vec![]));
    assert!(matches!(autograd::apply(undefined, &[&x]), Err(Error::Torch { .. })));
    let function = closures(|_, inputs| Ok(vec![&inputs[0] * 1.0]), |_, _| Ok(vec![]));
    assert!(matches!(autograd::apply(function, &[&Tensor::new()]), Err(Error::Torch { .. })));
    let outputs = [&x * 1.0, &x * 1.0];
    assert!(matches!(autograd::backward(&outputs, &[None], false), Err(Error::Argument { .. })));
    assert!(
        matches!(autograd::backward(&outputs, &[], false), Err(Error::Torch { .. })),
        "no gradient of two elements"
    );
    assert!(matches!(autograd::backward(&[Tensor::ones([], F64)], &[], false), Err(Error::Torch { .. })), "no graph");
}

#[test]
fn several_roots_with_given_gradients() {
    let x = leaf(&[3]);
    let (a, b, c) = (x.sin(), x.square(), x.sum(Kind::Double));
    let grad_b = Tensor::from_slice(&[1.0, -2.0, 0.5]);
    let grads = [Some(Tensor::ones([3], F64)), Some(grad_b.shallow_clone()), None];
    autograd::backward(&[a, b, c], &grads, false).unwrap();
    assert!(distance(&x.grad(), &(x.detach().cos() + x.detach() * 2.0 * grad_b + 1.0)) < 1e-12);
}

#[test]
fn grad_of_unused_inputs_and_of_gradients() {
    let (x, other) = (leaf(&[3]), leaf(&[1]));
    let loss = (&x * &x * &x).sum(Kind::Double);
    let grads = autograd::grad(&[loss], &[x.shallow_clone(), other], &[], true, true).unwrap();
    assert!(grads[1].is_none());
    let first = grads[0].as_ref().unwrap();
    assert!(distance(first, &(x.detach().square() * 3.0)) < 1e-12);
    let second = autograd::grad(&[first.sum(Kind::Double)], &[x.shallow_clone()], &[], false, false).unwrap();
    assert!(distance(second[0].as_ref().unwrap(), &(x.detach() * 6.0)) < 1e-12);
    assert!(!x.grad().defined(), "grad accumulates nothing");
}

#[test]
fn a_function_can_be_differentiated_twice() {
    let (x, w) = (leaf(&[2, 3]), leaf(&[3, 2]));
    let ours = product(&x, &w)[0].square().sum(Kind::Double);
    let theirs = (x.matmul(&w) * 3.0).square().sum(Kind::Double);
    let inputs = [x.shallow_clone(), w.shallow_clone()];
    let second = |loss: Tensor| {
        let first = autograd::grad(&[loss], &inputs, &[], true, true).unwrap();
        let norm = first.iter().map(|grad| grad.as_ref().unwrap().square().sum(Kind::Double)).sum::<Tensor>();
        autograd::grad(&[norm], &inputs, &[], false, false).unwrap()
    };
    for (ours, theirs) in second(ours).iter().zip(second(theirs)) {
        assert!(distance(ours.as_ref().unwrap(), &theirs.unwrap()) < 1e-9);
    }
}

#[test]
fn gradients_can_be_set() {
    let x = leaf(&[2]);
    autograd::set_gradient(&x, Some(&Tensor::ones([2], F64))).unwrap();
    autograd::backward(&[(&x * 2.0).sum(Kind::Double)], &[], false).unwrap();
    assert!(distance(&x.grad(), &Tensor::full([2], 3.0, F64)) < 1e-12);
    autograd::set_gradient(&x, None).unwrap();
    assert!(!x.grad().defined());
    for bad in [Tensor::ones([3], F64), Tensor::ones([2], (Kind::Float, Device::Cpu)), Tensor::new()] {
        assert!(matches!(autograd::set_gradient(&x, Some(&bad)), Err(Error::Torch { .. })));
    }
    assert!(matches!(autograd::set_gradient(&(&x * 2.0), None), Err(Error::Torch { .. })));
}

#[test]
fn a_backward_runs_on_the_calling_thread() {
    let x = leaf(&[2]);
    let here = std::thread::current().id();
    let out = double(&x, move |_, grads| {
        assert_eq!(std::thread::current().id(), here);
        Ok(grads)
    });
    autograd::backward(&[out.sum(Kind::Double)], &[], false).unwrap();
}

#[test]
fn threads_share_a_function() {
    let x = leaf(&[2]);
    let inside = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&inside);
    let out = double(&x, move |_, grads| {
        assert_eq!(count.fetch_add(1, Ordering::SeqCst), 0, "two threads inside at once");
        std::thread::sleep(std::time::Duration::from_millis(2));
        count.fetch_sub(1, Ordering::SeqCst);
        Ok(grads)
    });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let out = out.sum(Kind::Double);
            scope.spawn(move || autograd::backward(&[out], &[], true).unwrap());
        }
    });
    assert!(distance(&x.grad(), &Tensor::full([2], 4.0, F64)) < 1e-12);
}
