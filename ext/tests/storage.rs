//! Memory that comes and goes under a tensor, and tensors as bytes.
#![allow(clippy::unwrap_used, unsafe_code)]

use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_ext::{BoxError, Error, memory, storage};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn distance(left: &Tensor, right: &Tensor) -> f64 {
    (left - right).abs().max().double_value(&[])
}

#[test]
fn a_released_storage_comes_back_for_every_view() {
    let whole = Tensor::arange(12, F64);
    let (left, right) = (whole.narrow(0, 0, 6), whole.narrow(0, 6, 6).view([2, 3]));
    let values = whole.copy();
    assert_eq!((storage::nbytes(&whole), storage::nbytes(&left)), (96, 96));
    assert!(storage::shares_storage(&left, &right) && !storage::shares_storage(&left, &values));

    storage::release(&left).unwrap();
    assert_eq!(storage::nbytes(&right), 0);
    assert!(storage::is_released(&whole) && storage::is_released(&right) && !storage::is_released(&values));
    assert!(storage::shares_storage(&left, &right), "as before");
    let view = whole.narrow(0, 6, 3);
    assert_eq!((right.size(), view.size()), (vec![2, 3], vec![3]));
    // An error, not a crash.
    assert!(right.f_neg().unwrap_err().to_string().contains("was released"));
    assert!(left.shallow_clone().f_neg_().is_err());
    assert!(storage::overwrite(&whole, &values).is_err());
    assert!(storage::to_bytes(&right).is_err());
    assert!(storage::write(&right, &[0; 48]).is_err());
    storage::release(&whole).unwrap();

    storage::refill(&right).unwrap();
    storage::refill(&left).unwrap();
    assert_eq!(storage::nbytes(&whole), 96);
    storage::overwrite(&whole, &values).unwrap();
    storage::refill(&whole).unwrap();
    assert!(right.equal(&values.narrow(0, 6, 6).view([2, 3])));
    assert!(view.equal(&values.narrow(0, 6, 3)));
}

#[test]
fn released_memory_is_given_back() {
    const BYTES: usize = 64 << 20;
    let tensors: Vec<Tensor> = (0..4).map(|_| Tensor::ones([BYTES as i64 / 8], F64)).collect();
    let with = memory::rss().unwrap();
    tensors.iter().for_each(|tensor| storage::release(tensor).unwrap());
    let without = memory::rss().unwrap();
    assert!(without + 3 * BYTES as u64 <= with, "{with} {without}");
    tensors.iter().for_each(|tensor| storage::refill(tensor).unwrap());
}

#[test]
fn tensors_without_elements_or_storage() {
    let empty = Tensor::zeros([0, 3], F64);
    assert!(!storage::is_released(&empty));
    storage::release(&empty).unwrap();
    storage::refill(&empty).unwrap();
    assert!(storage::to_bytes(&empty).unwrap().is_empty());
    let undefined = Tensor::new();
    assert_eq!((storage::nbytes(&undefined), storage::version(&undefined)), (0, 0));
    assert!(!storage::is_released(&undefined));
    assert!(!storage::shares_storage(&undefined, &undefined));
    assert!(storage::release(&undefined).is_err() && storage::refill(&undefined).is_err());
    assert!(storage::overwrite(&undefined, &empty).is_err() && storage::set_data(&undefined, &empty).is_err());
    assert!(storage::to_bytes(&undefined).is_err());
    let mut borrowed = [1.0f32; 4];
    // SAFETY: the array outlives the tensor.
    let foreign = unsafe { Tensor::from_blob(borrowed.as_mut_ptr().cast(), &[4], &[1], Kind::Float, Device::Cpu) };
    assert!(matches!(storage::release(&foreign), Err(Error::Torch { .. })), "not libtorch's to free");
}

#[test]
fn saved_tensors_see_the_refilled_storage() {
    let full = Tensor::randn([4, 4], F64);
    let keep = full.copy();
    let w = full.detach().set_requires_grad(true);
    let x = Tensor::randn([2, 4], F64).set_requires_grad(true);
    let before = storage::version(&w);
    let loss = x.matmul(&w).square().sum(Kind::Double);
    storage::release(&w).unwrap();
    storage::refill(&w).unwrap();
    storage::overwrite(&full, &keep).unwrap();
    assert_eq!(storage::version(&w), before);
    loss.backward();
    let want = x.detach().tr().matmul(&(x.detach().matmul(&keep) * 2.0));
    assert!(distance(&w.grad(), &want) < 1e-12);
    // What autograd sees counts.
    let _ = full.shallow_clone().fill_(0.0);
    assert_eq!(storage::version(&w), before + 1);
    assert!(matches!(storage::overwrite(&full, &keep.narrow(0, 0, 1)), Err(Error::Torch { .. })), "no broadcast");
}

#[test]
fn a_function_can_refill_in_its_backward() {
    /// y = x·w, whose parameter is there only while it runs, as in fully sharded data parallelism.
    struct Sharded {
        keep: Tensor,
    }
    impl Function for Sharded {
        fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
            let (x, w) = (&inputs[0], &inputs[1]);
            storage::refill(w)?;
            storage::overwrite(w, &self.keep)?;
            context.save(&[x.shallow_clone(), w.shallow_clone()]);
            let y = x.matmul(w);
            storage::release(w)?;
            Ok(vec![y])
        }
        fn backward(
            &mut self,
            context: &mut Context,
            grads: Vec<Option<Tensor>>,
        ) -> Result<Vec<Option<Tensor>>, BoxError> {
            let saved = context.saved()?;
            let (x, w) = (&saved[0], &saved[1]);
            let grad = grads[0].as_ref().ok_or("no gradient")?;
            storage::refill(w)?;
            storage::overwrite(w, &self.keep)?;
            let grads = vec![Some(grad.matmul(&w.tr())), Some(x.tr().matmul(grad))];
            storage::release(w)?;
            Ok(grads)
        }
    }
    let keep = Tensor::randn([3, 3], F64);
    let w = keep.copy().set_requires_grad(true);
    storage::release(&w).unwrap();
    let x = Tensor::randn([2, 3], F64).set_requires_grad(true);
    let mut y = x.shallow_clone();
    for _ in 0..3 {
        y = autograd::apply(Sharded { keep: keep.shallow_clone() }, &[&y, &w]).unwrap().remove(0).tanh();
        assert!(storage::is_released(&w));
    }
    autograd::backward(&[y.sum(Kind::Double)], &[], false).unwrap();
    let dense = keep.copy().set_requires_grad(true);
    let mut want = x.shallow_clone();
    for _ in 0..3 {
        want = want.matmul(&dense).tanh();
    }
    let want = autograd::grad(&[want.sum(Kind::Double)], &[x.shallow_clone(), dense], &[], false, false).unwrap();
    assert!(distance(&x.grad(), want[0].as_ref().unwrap()) < 1e-12);
    assert!(distance(&w.grad(), want[1].as_ref().unwrap()) < 1e-12);
}

#[test]
fn data_can_be_exchanged() {
    let w = Tensor::ones([4], F64).set_requires_grad(true);
    let flat = Tensor::arange(8, F64);
    storage::set_data(&w, &flat.narrow(0, 4, 4)).unwrap();
    assert!(storage::shares_storage(&w, &flat) && w.requires_grad() && w.is_leaf());
    assert_eq!(w.double_value(&[0]), 4.0);
    w.square().sum(Kind::Double).backward();
    assert_eq!(w.grad().double_value(&[3]), 14.0);
}

const KINDS: [Kind; 17] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::Float,
    Kind::Double,
    Kind::ComplexHalf,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Bool,
    Kind::BFloat16,
    Kind::Float8e5m2,
    Kind::Float8e4m3fn,
    Kind::Float8e5m2fnuz,
    Kind::Float8e4m3fnuz,
];

proptest! {
    #[test]
    fn bytes_make_a_round_trip(
        kind in prop::sample::select(KINDS.to_vec()),
        shape in prop::collection::vec(0i64..5, 0..4),
        seed in any::<u64>(),
    ) {
        let count = shape.iter().product::<i64>() as usize * kind.elt_size_in_bytes();
        // A bool is 0 or 1; all else takes any bits, NaNs included.
        let bytes: Vec<u8> = (0..count as u64)
            .map(|index| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 40) as u8)
            .map(|byte| if kind == Kind::Bool { byte & 1 } else { byte })
            .collect();
        let tensor = storage::from_bytes(&bytes, &shape, kind).unwrap();
        prop_assert_eq!((tensor.kind(), tensor.size(), tensor.device()), (kind, shape, Device::Cpu));
        prop_assert_eq!(&storage::to_bytes(&tensor).unwrap(), &bytes);
        // Through other strides, in both directions.
        if tensor.dim() > 1 {
            let turned = tensor.transpose(0, 1);
            let there = storage::to_bytes(&turned).unwrap();
            let target = storage::from_bytes(&bytes, &tensor.size(), kind).unwrap();
            storage::write(&target.transpose(0, 1), &there).unwrap();
            prop_assert_eq!(&storage::to_bytes(&target).unwrap(), &bytes);
        }
    }
}

#[test]
fn bytes_are_the_elements_in_order() {
    let tensor = Tensor::from_slice(&[1i16, -2, 300, 4, 5, 6]).view([2, 3]);
    let want: Vec<u8> = [1i16, 4, -2, 5, 300, 6].iter().flat_map(|value| value.to_ne_bytes()).collect();
    assert_eq!(storage::to_bytes(&tensor.tr()).unwrap(), want);
    let half = Tensor::from_slice(&[1.0f32, -2.5]).to_kind(Kind::BFloat16);
    assert_eq!(storage::to_bytes(&half).unwrap(), [0x3f80u16, 0xc020].map(u16::to_ne_bytes).concat());
    let eighth = Tensor::from_slice(&[1.0f32, -448.0]).to_kind(Kind::Float8e4m3fn);
    assert_eq!(storage::to_bytes(&eighth).unwrap(), [0x38, 0xfe]);
    let w = Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let before = storage::version(&w);
    storage::write(&w, &[1.5f32, 2.5].map(f32::to_ne_bytes).concat()).unwrap();
    assert_eq!((w.double_value(&[1]), storage::version(&w), w.requires_grad()), (2.5, before, true));
}

#[test]
fn bytes_of_the_wrong_number_are_refused() {
    for (bytes, shape) in
        [(3usize, vec![2i64]), (8, vec![1]), (8, vec![-2]), (0, vec![i64::MAX, i64::MAX]), (0, vec![i64::MAX])]
    {
        let error = storage::from_bytes(&vec![0; bytes], &shape, Kind::Float).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error}");
    }
    let tensor = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    assert!(matches!(storage::read(&tensor, &mut [0; 7]), Err(Error::Torch { .. })));
    assert!(matches!(storage::write(&tensor, &[0; 9]), Err(Error::Torch { .. })));
}
