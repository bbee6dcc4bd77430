//! Pictures for the page, as SVG: lines over steps, and bars.

use std::fmt::Write as _;

/// The colors of groups of ranks and of curves, dark enough on white.
pub(super) const COLORS: [&str; 8] =
    ["#1b6ca8", "#c8553d", "#3a7d44", "#7b4fa3", "#b8860b", "#2a9d8f", "#a23b72", "#5c677d"];

/// A curve.
#[derive(Debug)]
pub(super) struct Curve<'a> {
    pub(super) name: &'a str,
    pub(super) points: Vec<(f64, f64)>,
    pub(super) color: &'static str,
    pub(super) is_bold: bool,
}

/// What is drawn, and how its axis is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// From the least value to the largest.
    Linear,
    /// By powers of ten; what is not above zero is at the bottom.
    Log,
}

const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 310.0;
/// Room for the words around the plot.
const LEFT: f64 = 78.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;

/// What is below this counts as nothing on a scale of powers of ten.
const SMALLEST: f64 = 1e-17;

/// Curves over each other; `label` says what the vertical axis is.
pub(super) fn lines(label: &str, scale: Scale, curves: &[Curve<'_>]) -> String {
    let on_axis = |value: f64| match scale {
        Scale::Linear => value,
        Scale::Log => value.max(SMALLEST).log10(),
    };
    let finite: Vec<(f64, f64)> = curves
        .iter()
        .flat_map(|curve| &curve.points)
        .map(|(step, value)| (*step, on_axis(*value)))
        .filter(|(_, value)| value.is_finite())
        .collect();
    let mut out =
        format!("<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">", escaped(label));
    if finite.is_empty() {
        let _ = write!(out, "<text x=\"{}\" y=\"{}\" class=\"axis\">no data</text></svg>", WIDTH / 2.0, HEIGHT / 2.0);
        return out;
    }
    let range = |of: &dyn Fn(&(f64, f64)) -> f64| {
        let least = finite.iter().map(of).fold(f64::INFINITY, f64::min);
        let most = finite.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
        if most > least { (least, most) } else { (least, least + 1.0) }
    };
    let (first, last) = range(&|point| point.0);
    let (mut low, mut high) = range(&|point| point.1);
    if scale == Scale::Log {
        (low, high) = (low.floor(), high.ceil().max(low.floor() + 1.0));
    }
    let x = |step: f64| LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);

    for (at, word) in vertical_ticks(scale, low, high) {
        let at = y(at);
        let _ =
            write!(out, "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" class=\"grid\"/>", WIDTH - RIGHT);
        let _ = write!(out, "<text x=\"{}\" y=\"{:.1}\" class=\"axis end\">{word}</text>", LEFT - 7.0, at + 4.5);
    }
    for step in step_ticks(first, last) {
        let at = x(step);
        let _ = write!(out, "<text x=\"{at:.1}\" y=\"{}\" class=\"axis middle\">{step}</text>", HEIGHT - BOTTOM + 18.0);
    }
    let _ = write!(
        out,
        "<text x=\"{}\" y=\"{}\" class=\"axis middle\">step</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 6.0
    );
    // Those to be looked at are drawn last, and so on top.
    for is_bold in [false, true] {
        for curve in curves.iter().filter(|curve| curve.is_bold == is_bold) {
            let points: Vec<String> = curve
                .points
                .iter()
                .filter(|(_, value)| on_axis(*value).is_finite())
                .map(|(step, value)| format!("{:.1},{:.1}", x(*step), y(on_axis(*value))))
                .collect();
            let width = if is_bold { 2.5 } else { 1.3 };
            let _ = write!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\"><title>{}</title></polyline>",
                points.join(" "),
                curve.color,
                escaped(curve.name)
            );
        }
    }
    out.push_str("</svg>");
    out
}

/// Places on the vertical axis, and the words beside them.
fn vertical_ticks(scale: Scale, low: f64, high: f64) -> Vec<(f64, String)> {
    match scale {
        Scale::Log => {
            let every = ((high - low) / 8.0).ceil().max(1.0);
            let count = ((high - low) / every) as usize;
            let tick = |index: usize| low + index as f64 * every;
            (0..=count)
                .map(|index| {
                    let power = tick(index);
                    let word = if power <= SMALLEST.log10() { "0".to_owned() } else { format!("1e{power}") };
                    (power, word)
                })
                .collect()
        }
        Scale::Linear => {
            let digits = (2.0 - (high - low).log10().floor()).clamp(0.0, 15.0) as usize;
            (0..=4)
                .map(|index| low + f64::from(index) / 4.0 * (high - low))
                .map(|at| (at, format!("{at:.digits$}")))
                .collect()
        }
    }
}

/// At most ten whole steps.
fn step_ticks(first: f64, last: f64) -> Vec<f64> {
    let every = ((last - first) / 9.0).ceil().max(1.0);
    let mut ticks = Vec::new();
    let mut at = first.ceil();
    while at <= last {
        ticks.push(at);
        at += every;
    }
    ticks
}

/// A bar of colored parts, each a part of the whole width, with the words for each.
pub(super) fn bar(width: f64, parts: &[(f64, &str, String)]) -> String {
    let mut out = format!("<svg class=\"bar\" width=\"{width}\" height=\"12\">");
    let mut at = 0.0;
    for (share, color, words) in parts {
        let long = (share * width).max(0.0);
        let _ = write!(
            out,
            "<rect x=\"{at:.1}\" width=\"{:.1}\" height=\"12\" fill=\"{color}\"><title>{}</title></rect>",
            // What is there is seen.
            if *share > 0.0 { long.max(1.0) } else { 0.0 },
            escaped(words)
        );
        at += long;
    }
    out.push_str("</svg>");
    out
}

/// Text within HTML.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
