//! Backward passes that are started inside of another one, as activation checkpointing does.
#![allow(clippy::unwrap_used)]

use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_ext::{BoxError, Error};
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

/// An error that can be told from others.
#[derive(Debug, thiserror::Error)]
#[error("number {0}")]
struct Numbered(u32);

/// Recomputes its body in the backward, as activation checkpointing does.
struct Checkpoint {
    depth: usize,
    w: Tensor,
}

fn body(x: &Tensor, w: &Tensor, depth: usize) -> Result<Tensor, Error> {
    let y = x.matmul(w).tanh();
    if depth == 0 {
        return Ok(y);
    }
    let inner = Checkpoint { depth: depth - 1, w: w.shallow_clone() };
    Ok(autograd::apply(inner, &[&y, w])?.remove(0))
}

impl Function for Checkpoint {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        context.save(&[inputs[0].shallow_clone()]);
        Ok(vec![body(&inputs[0], &self.w, self.depth)?])
    }

    fn backward(&mut self, context: &mut Context, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> {
        let x = context.saved()?[0].detach().set_requires_grad(true);
        if self.w.double_value(&[0, 0]) == 77.0 && self.depth == 0 {
            return Err(Numbered(3).into());
        }
        let out = autograd::with_grad_mode(true, || body(&x, &self.w, self.depth))?;
        // The parameter's gradient is accumulated by the nested pass itself.
        autograd::backward(&[out], &grads, false)?;
        Ok(vec![Some(x.grad()), None])
    }
}

#[test]
fn a_backward_pass_inside_a_backward_pass() {
    for depth in [0, 1, 5, 70] {
        let (x, w) = (leaf(&[2, 3]), leaf(&[3, 3]));
        let out = autograd::apply(Checkpoint { depth, w: w.shallow_clone() }, &[&x, &w]).unwrap().remove(0);
        autograd::backward(&[out.square().sum(Kind::Double)], &[], false).unwrap();
        let mut want = x.shallow_clone();
        for _ in 0..=depth {
            want = want.matmul(&w).tanh();
        }
        let want = autograd::grad(
            &[want.square().sum(Kind::Double)],
            &[x.shallow_clone(), w.shallow_clone()],
            &[],
            false,
            false,
        );
        let want = want.unwrap();
        assert!(distance(&x.grad(), want[0].as_ref().unwrap()) < 1e-12);
        assert!(distance(&w.grad(), want[1].as_ref().unwrap()) < 1e-12);
    }
}

#[test]
fn an_error_of_a_nested_pass_stays_what_it_is() {
    let (x, w) = (leaf(&[2, 2]), Tensor::full([2, 2], 77.0, F64).set_requires_grad(true));
    let out = autograd::apply(Checkpoint { depth: 4, w: w.shallow_clone() }, &[&x, &w]).unwrap().remove(0);
    let error = autograd::backward(&[out.sum(Kind::Double)], &[], false).unwrap_err();
    assert!(
        matches!(&error, Error::Callback { source } if source.downcast_ref::<Numbered>().unwrap().0 == 3),
        "{error}"
    );
}
