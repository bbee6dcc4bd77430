//! Nanoseconds per element to fill a tensor with random values: `cargo bench -p ferrotitan-mesh`.

#![allow(clippy::print_stdout, reason = "a benchmark is there to print")]

use std::hint::black_box;
use std::time::Instant;

use ferrotitan_mesh::{Distribution, Region, Stream};

const ROWS: usize = 1 << 20;
const COLUMNS: usize = 16;

fn main() {
    let stream = Stream::new(42, "weight");
    let truncated = |bound: f64| Distribution::TruncatedNormal { mean: 0.0, std: 0.02, low: -bound, high: bound };
    let distributions = [
        Distribution::Uniform { low: -1.0, high: 1.0 },
        Distribution::Normal { mean: 0.0, std: 0.02 },
        truncated(2.0),
        truncated(0.06),
    ];
    let whole = Region::whole(&[ROWS, COLUMNS]);
    // The worst case of a region: every run is a single element.
    let column = Region { offset: vec![0, 3], shape: vec![ROWS, 1] };
    for distribution in distributions {
        for (name, region) in [("whole", &whole), ("column", &column)] {
            let mut out = vec![0.0; region.numel()];
            let start = Instant::now();
            stream.fill_region(distribution, &whole.shape, region, black_box(&mut out));
            let nanoseconds = start.elapsed().as_nanos() as f64 / out.len() as f64;
            println!("{nanoseconds:6.1} ns  {name:6}  {distribution:?}");
        }
    }
}
