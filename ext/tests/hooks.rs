//! Hooks on gradients: when they run, what they change, and what their failures do.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ferrotitan_ext::{Error, autograd, hooks};
use tch::{Device, Kind, Tensor};

fn leaf() -> Tensor {
    tch::set_num_threads(1);
    Tensor::from_slice(&[1.0, 2.0, 3.0]).set_requires_grad(true)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor).unwrap()
}

fn pass(loss: &Tensor) -> Result<(), Error> {
    autograd::backward(&[loss.sum(Kind::Double)], &[], true)
}

#[test]
fn a_gradient_hook_sees_and_changes() {
    let x = leaf();
    let y = &x * 2.0;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let look = hooks::on_gradient(&y, move |grad| {
        log.lock().unwrap().push(values(grad));
        Ok(None)
    });
    let _look = look.unwrap();
    let change = hooks::on_gradient(&y, |grad| Ok(Some(grad * 10.0))).unwrap();
    // Two uses: the hook runs once, with their sum.
    let z = &y * 3.0 + &y * 4.0;
    pass(&z).unwrap();
    assert_eq!(*seen.lock().unwrap(), [[7.0; 3]]);
    assert_eq!(values(&x.grad()), [140.0; 3]);

    change.remove().unwrap();
    let _ = x.grad().zero_();
    pass(&z).unwrap();
    assert_eq!(values(&x.grad()), [14.0; 3]);
    assert_eq!(seen.lock().unwrap().len(), 2);
}

#[test]
fn the_accumulated_hook_runs_after_the_gradient_is_there() {
    let x = leaf();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    hooks::on_gradient_accumulated(&x, move |leaf| {
        log.lock().unwrap().push(values(&leaf.grad()));
        // As sharding does: the gradient is taken away once it has been dealt with.
        let mut grad = leaf.grad();
        let _ = grad.zero_();
        Ok(())
    })
    .unwrap();
    let y = &x * 2.0 + &x;
    pass(&y).unwrap();
    pass(&y).unwrap();
    assert_eq!(*seen.lock().unwrap(), [[3.0; 3], [3.0; 3]]);

    let log = Arc::clone(&seen);
    hooks::on_gradient_accumulated(&x, move |_| {
        log.lock().unwrap().clear();
        Ok(())
    })
    .unwrap();
    pass(&y).unwrap();
    assert!(seen.lock().unwrap().is_empty(), "the second hook took the first one's place");
    hooks::clear_gradient_accumulated(&x).unwrap();
    hooks::clear_gradient_accumulated(&x).unwrap();
    seen.lock().unwrap().push(vec![]);
    pass(&y).unwrap();
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[test]
fn failures_end_the_pass() {
    let x = leaf();
    let y = &x * 2.0;
    let hook = hooks::on_gradient(&y, |_| Err("stop here".into())).unwrap();
    let error = pass(&y).unwrap_err();
    assert!(matches!(&error, Error::Callback { source } if source.to_string() == "stop here"), "{error}");
    hook.remove().unwrap();
    let hook = hooks::on_gradient(&y, |_| panic!("and here")).unwrap();
    let error = pass(&y).unwrap_err();
    assert!(matches!(&error, Error::Panicked { message } if message == "and here"), "{error}");
    hook.remove().unwrap();
    hooks::on_gradient_accumulated(&x, |_| Err(std::io::Error::other("disk").into())).unwrap();
    let error = pass(&y).unwrap_err();
    assert!(matches!(&error, Error::Callback { source } if source.is::<std::io::Error>()), "{error}");
    hooks::on_gradient_accumulated(&x, |_| panic!("twice")).unwrap();
    assert!(matches!(pass(&y), Err(Error::Panicked { .. })));
    hooks::clear_gradient_accumulated(&x).unwrap();
    pass(&y).unwrap();
}

#[test]
fn a_gradient_of_another_shape_is_refused() {
    let y = leaf() * 2.0;
    let _hook = hooks::on_gradient(&y, |_| Ok(Some(Tensor::ones([5], (Kind::Double, Device::Cpu))))).unwrap();
    assert!(matches!(pass(&y), Err(Error::Torch { .. })));
}

#[test]
fn only_tensors_with_gradients_take_hooks() {
    let plain = leaf().detach();
    assert!(matches!(hooks::on_gradient(&plain, |_| Ok(None)), Err(Error::Torch { .. })));
    assert!(matches!(hooks::on_gradient_accumulated(&plain, |_| Ok(())), Err(Error::Torch { .. })));
    let inner = leaf() * 2.0;
    assert!(matches!(hooks::on_gradient_accumulated(&inner, |_| Ok(())), Err(Error::Torch { .. })));
    assert!(matches!(hooks::clear_gradient_accumulated(&inner), Err(Error::Torch { .. })));
}

#[test]
fn a_hook_inside_itself_is_an_error() {
    let x = leaf();
    let y = &x * 2.0;
    let again = y.shallow_clone();
    let hook = hooks::on_gradient(&y, move |_| {
        autograd::with_grad_mode(true, || pass(&again))?;
        Ok(None)
    })
    .unwrap();
    let error = pass(&y).unwrap_err();
    assert!(error.to_string().contains("from inside itself"), "{error}");
    // The hook holds the tensor that holds it.
    hook.remove().unwrap();
}

#[test]
fn hooks_are_dropped_with_their_tensor() {
    struct Drops(Arc<AtomicUsize>);
    impl Drop for Drops {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let guard = || Drops(Arc::clone(&dropped));
    let x = leaf();
    let y = &x * 2.0;
    let (a, b, c) = (guard(), guard(), guard());
    let handle = hooks::on_gradient(&y, move |_| {
        let _held = &a;
        Ok(None)
    });
    hooks::on_gradient_accumulated(&x, move |_| {
        let _held = &b;
        Ok(())
    })
    .unwrap();
    pass(&y).unwrap();
    assert_eq!(dropped.load(Ordering::SeqCst), 0);
    hooks::on_gradient_accumulated(&x, move |_| {
        let _held = &c;
        Ok(())
    })
    .unwrap();
    assert_eq!(dropped.load(Ordering::SeqCst), 1, "the hook that was replaced");
    drop((y, handle));
    assert_eq!(dropped.load(Ordering::SeqCst), 2, "the hook of the dropped graph");
    drop(x);
    assert_eq!(dropped.load(Ordering::SeqCst), 3, "the hook of the dropped leaf");
    let d = guard();
    assert!(
        hooks::on_gradient(&leaf().detach(), move |_| {
            let _held = &d;
            Ok(None)
        })
        .is_err()
    );
    assert_eq!(dropped.load(Ordering::SeqCst), 4, "the hook that was refused");
}
