//! Two matrices multiplied in eight bits, by each way to share scales, and what that costs in precision.
#![allow(clippy::print_stdout)]

use ferrotitan_float8::tch::{Device, Kind, Tensor};
use ferrotitan_float8::{Format, Quantized, Result, multiply, quantize, quantize_blocks, quantize_rows};

type Way = fn(&Tensor) -> Result<Quantized>;

fn main() -> Result<()> {
    let random = |rows: i64| Tensor::randn([rows, 256], (Kind::BFloat16, Device::Cpu));
    let (x, w) = (random(64), random(128));
    let exact = x.to_kind(Kind::Double).matmul(&w.to_kind(Kind::Double).tr());
    let ways: [(&str, Way); 3] = [
        ("one scale a tensor", |x| quantize(x, Format::E4m3, false)),
        ("one scale a row", |x| quantize_rows(x, Format::E4m3, true)),
        ("one scale a block", |x| quantize_blocks(x, Format::E4m3)),
    ];
    for (name, cast) in ways {
        let product = multiply(&cast(&x)?, &cast(&w)?, Kind::BFloat16, true, false)?;
        let error = (product.to_kind(Kind::Double) - &exact).norm() / exact.norm();
        println!("{name}: off by {:.2} %", 100.0 * error.double_value(&[]));
    }
    Ok(())
}
