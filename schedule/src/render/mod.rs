//! Pictures of timelines, simulated or measured: as text ([`text`]) and as SVG ([`svg`]).
//!
//! ```
//! use ferrotitan_schedule::{Algorithm, Costs, render, simulate};
//! # fn main() -> ferrotitan_schedule::Result<()> {
//! let schedule = Algorithm::OneForwardOneBackward.generate(2, 1, 2)?;
//! let picture = render::text(&simulate(&schedule, &Costs::default())?);
//! assert_eq!(
//!     picture,
//!     "1F1B: makespan 9, ideal 6, bubble 3 (50.0 % of the ideal, 33.3 % of the ranks' time)\n\
//!      \x20       0       2       4       6       8\n\
//!      rank 0  0F0 0F1 ........0B0---- ....0B1----\n\
//!      rank 1  ....1F0 1B0---- 1F1 1B1---- ........\n"
//! );
//! # Ok(())
//! # }
//! ```

mod svg;
mod text;

pub use svg::svg;
pub use text::text;

use crate::timeline::Timeline;

/// The line of figures above a picture.
fn figures(timeline: &Timeline) -> String {
    let unit = match timeline.unit() {
        "" => String::new(),
        unit => format!(" {unit}"),
    };
    format!(
        "makespan {}{unit}, ideal {}{unit}, bubble {}{unit} ({:.1} % of the ideal, {:.1} % of the ranks' time)",
        number(timeline.makespan()),
        number(timeline.ideal()),
        number(timeline.bubble()),
        100.0 * timeline.bubble_ratio(),
        100.0 * timeline.idle_share(),
    )
}

/// How much of a width a unit of time takes. Nothing, where nothing takes time, or so little that it cannot be
/// divided by.
fn scale(width: f64, makespan: f64) -> f64 {
    if makespan > 1e-250 { width / makespan } else { 0.0 }
}

/// A number with as many digits as tell something: about four.
fn number(value: f64) -> String {
    let size = value.abs();
    let decimals = match size {
        _ if size >= 1e15 || (size < 1e-6 && size > 0.0) => return format!("{value:.3e}"),
        _ if size >= 1000.0 => 0,
        _ if size >= 1.0 || size == 0.0 => 3,
        _ => 3 + (-size.log10()).floor() as usize,
    };
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

/// The distance between ticks of a time axis: 1, 2 or 5 times a power of ten, and at least `least`.
fn tick(least: f64) -> f64 {
    let power = 10.0_f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least * (1.0 - 1e-9)).unwrap_or(10.0);
    factor * power
}
