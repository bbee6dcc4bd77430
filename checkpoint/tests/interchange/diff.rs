//! Comparisons.

use ferrotitan_checkpoint::interchange::{Finding, Memory, diff};
use ferrotitan_checkpoint::tch::{Kind, Tensor};
use ferrotitan_checkpoint::{Dtype, Source};

#[test]
fn every_kind_of_difference_is_found() {
    let (mut a, mut b) = (Memory::new(), Memory::new());
    let large = Tensor::arange(3_000_000, (Kind::Float, ferrotitan_checkpoint::tch::Device::Cpu));
    let changed = large.copy();
    let _ = changed.get(2_999_999).fill_(2_999_999.0 + 750_000.0);
    let _ = changed.get(1).fill_(4.0);
    a.insert("changed", &large).unwrap();
    b.insert("changed", &changed).unwrap();
    a.insert("same", &large).unwrap();
    b.insert("same", &large).unwrap();
    a.insert("left", &large.get(0)).unwrap();
    b.insert("right", &large.get(0)).unwrap();
    a.insert("shape", &large.narrow(0, 0, 4)).unwrap();
    b.insert("shape", &large.narrow(0, 0, 4).view([2, 2])).unwrap();
    a.insert("dtype", &large.narrow(0, 0, 4)).unwrap();
    b.insert("dtype", &large.narrow(0, 0, 4).to_kind(Kind::BFloat16)).unwrap();
    let nan = Tensor::from_slice(&[f64::NAN, 0.0, 1.0]);
    a.insert("nan", &nan).unwrap();
    b.insert("nan", &Tensor::from_slice(&[f64::NAN, -0.0, 1.0])).unwrap();
    a.insert("number", &nan).unwrap();
    b.insert("number", &Tensor::from_slice(&[1.0, 0.0, 1.0])).unwrap();
    a.insert("empty", &Tensor::zeros([0], (Kind::Int64, large.device()))).unwrap();
    b.insert("empty", &Tensor::zeros([0], (Kind::Int64, large.device()))).unwrap();

    let mut told = Vec::new();
    let found = diff(&a, &b, &mut |done, total| told.push((done, total))).unwrap();
    let values = |dtypes, elements, absolute, relative| Finding::Values { dtypes, elements, absolute, relative };
    let expected = [
        ("changed", values((Dtype::F32, Dtype::F32), 2, 750_000.0, 0.75)),
        ("dtype", values((Dtype::F32, Dtype::Bf16), 0, 0.0, 0.0)),
        ("left", Finding::OnlyInFirst),
        ("number", values((Dtype::F64, Dtype::F64), 1, f64::INFINITY, f64::INFINITY)),
        ("right", Finding::OnlyInSecond),
        ("shape", Finding::Shapes(vec![4], vec![2, 2])),
    ];
    let found: Vec<_> = found.into_iter().map(|difference| (difference.tensor, difference.finding)).collect();
    assert_eq!(found, expected.map(|(name, finding)| (name.to_owned(), finding)));
    assert!(told.len() > 4 && told.windows(2).all(|pair| pair[0].0 <= pair[1].0));
    let (done, total) = *told.last().unwrap();
    assert_eq!(done, total);
    assert_eq!(diff(&a, &a, &mut |_, _| ()).unwrap(), []);
    assert!(a.tensors().len() > 6);
}
