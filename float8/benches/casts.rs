//! How long a projection's casts take, beside the products that they serve, by its widths: where the table of the
//! automatic filter comes from. `cargo bench -p ferrotitan-float8`.
#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use ferrotitan_float8::nn::{Gemm, Native};
use ferrotitan_float8::tch::{self, Device, Kind, Tensor};
use ferrotitan_float8::{Format, quantize, quantize_blocks, quantize_rows};

const TOKENS: i64 = 512;

/// The shortest of several runs.
fn time(mut body: impl FnMut()) -> Duration {
    body();
    let run = |_| {
        let begin = Instant::now();
        body();
        begin.elapsed()
    };
    (0..5).map(run).min().unwrap_or_default()
}

fn main() {
    // As the table in `src/small.rs` was measured.
    tch::set_num_threads(1);
    println!("512 tokens, one thread: time of the casts over that of the three fp32 products");
    println!("{:>7} {:>7} {:>11} {:>11} {:>11} {:>11}", "inputs", "outputs", "tensorwise", "rowwise", "gw_hp", "mxfp8");
    for inputs in [64, 128, 192, 256, 384, 512, 1024] {
        for outputs in [64, 256, 1024] {
            let random = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
            let (x, w, dy) = (random([TOKENS, inputs]), random([outputs, inputs]), random([TOKENS, outputs]));
            let products = time(|| {
                let _ = Native.output(&x, &w);
                let _ = Native.input_gradient(&dy, &w);
                let _ = Native.weight_gradient(&dy, &x, &w);
            });
            let both = |x: &Tensor, cast: &dyn Fn(&Tensor)| {
                cast(x);
                cast(&x.tr());
            };
            let tensor = |x: &Tensor| drop(quantize(x, Format::E4m3, false));
            let rows = |x: &Tensor| drop(quantize_rows(x, Format::E4m3, true));
            let blocks = |x: &Tensor| drop(quantize_blocks(x, Format::E4m3));
            let all = |cast: &dyn Fn(&Tensor)| time(|| [&x, &w, &dy].into_iter().for_each(|x| both(x, cast)));
            let times = [
                all(&tensor),
                all(&rows),
                time(|| {
                    rows(&x);
                    rows(&w);
                    rows(&dy);
                    tensor(&w.tr());
                }),
                all(&blocks),
            ];
            print!("{inputs:>7} {outputs:>7}");
            for of in times {
                print!(" {:>11.2}", of.as_secs_f64() / products.as_secs_f64());
            }
            println!();
        }
    }
}
