//! How two checkpoints differ.

use ferrotitan_mesh::Region;
use tch::{Kind, Tensor};

use super::cast;
use crate::boxes::pieces;
use crate::{Dtype, Result, Source, TensorInfo};

/// Bytes of a tensor that are compared at a time.
const PIECE: usize = 8 << 20;

/// A tensor that is not the same in two sources.
#[derive(Clone, PartialEq, Debug)]
pub struct Difference {
    /// Its name.
    pub tensor: String,
    /// What is not the same.
    pub finding: Finding,
}

/// What is not the same in two tensors of one name.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Finding {
    /// Only the first source has it.
    OnlyInFirst,
    /// Only the second source has it.
    OnlyInSecond,
    /// They have these shapes.
    Shapes(Vec<usize>, Vec<usize>),
    /// They differ in dtype or values.
    Values {
        /// The types of their elements.
        dtypes: (Dtype, Dtype),
        /// How many elements have another value. Two that are no numbers are equal.
        elements: u64,
        /// The largest distance of two elements; infinite where one of them is no number.
        absolute: f64,
        /// The largest distance of two elements, over the larger magnitude of the two.
        relative: f64,
    },
}

/// Compares two sources, a piece of a tensor at a time. `progress` is told how many bytes of how many of the first were
/// compared.
///
/// Tensors that are the same in both, bit for bit or number for number in one dtype, are no difference.
///
/// # Errors
/// Those of the sources.
pub fn diff(first: &dyn Source, second: &dyn Source, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<Difference>> {
    let (mut differences, mut common) = (Vec::new(), Vec::new());
    let mut found = |tensor: &String, finding| differences.push(Difference { tensor: tensor.clone(), finding });
    for (name, a) in first.tensors() {
        match second.tensors().get(name) {
            None => found(name, Finding::OnlyInFirst),
            Some(b) if a.shape != b.shape => found(name, Finding::Shapes(a.shape.clone(), b.shape.clone())),
            Some(b) => common.push((name, a, b)),
        }
    }
    for name in second.tensors().keys().filter(|name| !first.tensors().contains_key(*name)) {
        found(name, Finding::OnlyInSecond);
    }
    let total = common.iter().map(|(_, info, _)| info.bytes().unwrap_or(0) as u64).sum();
    let mut done = 0;
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for (name, a, b) in common {
        let (mut elements, mut absolute, mut relative) = (0, 0.0_f64, 0.0_f64);
        for piece in pieces(&Region::whole(&a.shape), a.dtype.size().max(b.dtype.size()), PIECE) {
            read(first, name, a, &piece, &mut left)?;
            read(second, name, b, &piece, &mut right)?;
            if a.dtype != b.dtype || left != right {
                let compared = compare(&numbers(&left, a.dtype)?, &numbers(&right, b.dtype)?)?;
                elements += compared.0;
                absolute = absolute.max(compared.1);
                relative = relative.max(compared.2);
            }
            done += left.len() as u64;
            progress(done, total);
        }
        if elements > 0 || a.dtype != b.dtype {
            found(name, Finding::Values { dtypes: (a.dtype, b.dtype), elements, absolute, relative });
        }
    }
    differences.sort_by(|a, b| a.tensor.cmp(&b.tensor));
    Ok(differences)
}

/// Reads every tensor of a source once, a piece at a time: whether all of it is there, where a format has no checksums.
/// `progress` is told how many bytes of how many were read.
///
/// # Errors
/// Those of the source.
pub fn read_all(source: &dyn Source, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
    let total = source.tensors().values().map(|info| info.bytes().unwrap_or(0) as u64).sum();
    let (mut done, mut bytes) = (0, Vec::new());
    for (name, info) in source.tensors() {
        for piece in pieces(&Region::whole(&info.shape), info.dtype.size(), PIECE) {
            read(source, name, info, &piece, &mut bytes)?;
            done += bytes.len() as u64;
            progress(done, total);
        }
    }
    Ok(())
}

fn read(source: &dyn Source, name: &str, info: &TensorInfo, piece: &Region, out: &mut Vec<u8>) -> Result<()> {
    out.resize(piece.numel() * info.dtype.size(), 0);
    source.read(name, piece, out)
}

/// Elements in double precision, complex ones as two.
fn numbers(bytes: &[u8], dtype: Dtype) -> Result<Tensor> {
    let real = if dtype == Dtype::C64 { Dtype::F32 } else { dtype };
    Ok(cast::tensor(bytes, real)?.f_to_kind(Kind::Double)?)
}

/// How many elements differ, by how much at most, and by how much at most of the larger.
fn compare(a: &Tensor, b: &Tensor) -> Result<(u64, f64, f64)> {
    if a.size() != b.size() {
        // A complex tensor and a real one.
        return Ok((a.numel().min(b.numel()) as u64, f64::INFINITY, f64::INFINITY));
    }
    let equal = a.f_eq_tensor(b)?.f_logical_or(&a.f_isnan()?.f_logical_and(&b.f_isnan()?)?)?;
    let count = equal.f_logical_not()?.f_sum(Kind::Int64)?;
    let absolute = a.f_sub(b)?.f_abs()?.f_nan_to_num(f64::INFINITY, f64::INFINITY, None)?.f_masked_fill(&equal, 0.0)?;
    let larger = a.f_abs()?.f_maximum(&b.f_abs()?)?;
    let relative =
        absolute.f_div(&larger)?.f_nan_to_num(f64::INFINITY, f64::INFINITY, None)?.f_masked_fill(&equal, 0.0)?;
    Ok((count.f_int64_value(&[])? as u64, largest(&absolute)?, largest(&relative)?))
}

fn largest(numbers: &Tensor) -> Result<f64> {
    Ok(numbers.f_max()?.f_double_value(&[])?)
}
