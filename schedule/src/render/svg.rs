//! Timelines as SVG.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{figures, number, scale, tick};
use crate::action::{Action, Kind, Step};
use crate::timeline::Timeline;

const LEFT: f64 = 64.0;
const RIGHT: f64 = 76.0;
const TOP: f64 = 76.0;
const ROW: f64 = 36.0;
const BAR: f64 = 30.0;
const LEGEND: f64 = 56.0;
/// The width of a digit in the bars.
const DIGIT: f64 = 7.0;
/// Widths of the part under the time axis.
const WIDTHS: std::ops::RangeInclusive<f64> = 640.0..=12_000.0;

/// The colours of a kind, for a rank's first stage and for its last.
fn colours(kind: Kind) -> ([u8; 3], [u8; 3]) {
    match kind {
        Kind::Forward => ([0x2b, 0x6c, 0xb0], [0xa9, 0xcd, 0xf0]),
        Kind::Backward => ([0xc2, 0x5a, 0x12], [0xf8, 0xc4, 0x8f]),
        Kind::InputGradient => ([0xa8, 0x32, 0x6b], [0xf0, 0xae, 0xcd]),
        Kind::WeightGradient => ([0x2f, 0x7d, 0x46], [0xa8, 0xdc, 0xb4]),
    }
}

const KINDS: [(Kind, &str); 4] = [
    (Kind::Forward, "forward"),
    (Kind::Backward, "full backward"),
    (Kind::InputGradient, "input gradient"),
    (Kind::WeightGradient, "weight gradient"),
];

/// A self-contained picture: a row for each rank, a bar for each step with the number of its microbatch, one colour for
/// each kind and one shade for each of a rank's stages, idle time in grey with its share at the right. The bar of an
/// overlapped pair is its forward above its backward. Bars tell their action and times when pointed at.
pub fn svg(timeline: &Timeline) -> String {
    let makespan = timeline.makespan();
    let ranks = timeline.ranks().len();
    let shortest = timeline.ranks().iter().flatten().map(|span| span.end - span.start).filter(|&time| time > 0.0);
    let digits = timeline.ranks().iter().flatten().flat_map(|span| span.step.actions());
    let digits = digits.map(|action| action.microbatch).max().unwrap_or(0).to_string().len();
    let wanted = (digits as f64 * DIGIT + 8.0) * makespan / shortest.fold(f64::INFINITY, f64::min);
    let inner = if wanted.is_finite() { wanted.clamp(*WIDTHS.start(), *WIDTHS.end()) } else { *WIDTHS.start() };
    let picture = Picture { timeline, inner, scale: scale(inner, makespan) };

    let (width, bottom) = (LEFT + inner + RIGHT, TOP + ranks as f64 * ROW);
    let height = bottom + LEGEND;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} \
         {height:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"#ffffff\"/>\n"
    );
    let title = escape(timeline.name());
    out += &format!("<title>{title}</title>\n");
    out += &text(LEFT, 22.0, "font-size=\"16\" font-weight=\"bold\"", &title);
    out += &text(LEFT, 42.0, "", &escape(&figures(timeline)));
    picture.axis(&mut out, bottom);
    for rank in 0..ranks {
        picture.row(&mut out, rank);
    }
    picture.legend(&mut out, bottom + 24.0);
    out += "</svg>\n";
    out
}

struct Picture<'a> {
    timeline: &'a Timeline,
    /// Pixels of the makespan.
    inner: f64,
    /// Pixels of a unit of time.
    scale: f64,
}

impl Picture<'_> {
    fn x(&self, time: f64) -> f64 {
        LEFT + time * self.scale
    }

    fn axis(&self, out: &mut String, bottom: f64) {
        if self.scale == 0.0 {
            return;
        }
        let between = tick(56.0 / self.scale);
        let times = (0..).map(|at| f64::from(at) * between);
        for time in times.take_while(|&time| time <= self.timeline.makespan()) {
            let x = self.x(time);
            let _ = writeln!(out, "<path d=\"M{x:.2} {:.0}V{bottom:.0}\" stroke=\"#d0d4d9\"/>", TOP - 8.0);
            *out += &text(x, TOP - 12.0, "text-anchor=\"middle\" fill=\"#4a5260\" font-size=\"11\"", &number(time));
        }
        if !self.timeline.unit().is_empty() {
            let style = "text-anchor=\"end\" fill=\"#4a5260\" font-size=\"11\"";
            *out += &text(LEFT - 12.0, TOP - 12.0, style, &escape(self.timeline.unit()));
        }
    }

    fn row(&self, out: &mut String, rank: usize) {
        let top = TOP + rank as f64 * ROW + (ROW - BAR) / 2.0;
        let middle = top + BAR / 2.0 + 4.0;
        *out += &text(LEFT - 10.0, middle, "text-anchor=\"end\"", &format!("rank {rank}"));
        let inner = self.inner;
        let _ =
            writeln!(out, "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{inner:.2}\" height=\"{BAR}\" fill=\"#eef0f2\"/>");
        let stages = self.stages(rank);
        for span in &self.timeline.ranks()[rank] {
            let (x, width) = (self.x(span.start), (span.end - span.start) * self.scale);
            if width <= 0.0 {
                continue;
            }
            let (start, end) = (number(span.start), number(span.end));
            let _ = writeln!(out, "<g><title>{}: {start} to {end}</title>", name(span.step));
            match span.step {
                Step::One(action) => bar(out, action, &stages, [x, top, width, BAR]),
                Step::Pair { forward, backward } => {
                    bar(out, forward, &stages, [x, top, width, BAR / 2.0]);
                    bar(out, backward, &stages, [x, top + BAR / 2.0, width, BAR / 2.0]);
                }
            }
            *out += "</g>\n";
        }
        let makespan = self.timeline.makespan();
        if makespan > 0.0 {
            let idle = 100.0 * (1.0 - self.timeline.busy(rank) / makespan).max(0.0);
            let x = LEFT + self.inner + 8.0;
            *out += &text(x, middle, "fill=\"#4a5260\" font-size=\"11\"", &format!("{idle:.1} % idle"));
        }
    }

    /// The stages that a rank works on, in ascending order.
    fn stages(&self, rank: usize) -> Vec<usize> {
        let spans = &self.timeline.ranks()[rank];
        let stages: BTreeSet<usize> = spans.iter().flat_map(|span| span.step.actions()).map(|a| a.stage).collect();
        stages.into_iter().collect()
    }

    fn legend(&self, out: &mut String, y: f64) {
        let actions = || self.timeline.ranks().iter().flatten().flat_map(|span| span.step.actions());
        let shades = (0..self.timeline.ranks().len()).map(|rank| self.stages(rank).len()).max().unwrap_or(0);
        let mut x = LEFT;
        for (kind, name) in KINDS {
            if !actions().any(|action| action.kind == kind) {
                continue;
            }
            for shade in 0..shades {
                let fill = hex(shade_of(kind, shade, shades));
                let _ =
                    writeln!(out, "<rect x=\"{x}\" y=\"{:.0}\" width=\"16\" height=\"14\" fill=\"{fill}\"/>", y - 11.0);
                x += 18.0;
            }
            *out += &text(x + 4.0, y, "", &format!("{} {name}", kind.letter()));
            x += 20.0 + 7.0 * (name.len() + 2) as f64;
        }
        if shades > 1 {
            *out += &text(x, y, "fill=\"#4a5260\"", "darker: a rank's earlier stages");
        }
    }
}

fn name(step: Step) -> String {
    match step {
        Step::One(action) => action.to_string(),
        Step::Pair { forward, backward } => format!("{forward} with {backward}"),
    }
}

fn bar(out: &mut String, action: Action, stages: &[usize], [x, y, width, height]: [f64; 4]) {
    let shade = stages.iter().position(|&stage| stage == action.stage).unwrap_or(0);
    let colour = shade_of(action.kind, shade, stages.len());
    let fill = hex(colour);
    let _ = writeln!(
        out,
        "<rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{height}\" fill=\"{fill}\" stroke=\"#ffffff\" \
         stroke-width=\"0.8\"/>"
    );
    let label = action.microbatch.to_string();
    if label.len() as f64 * DIGIT + 2.0 <= width {
        // The weights with which red, green and blue seem bright.
        let brightness = 0.299 * f64::from(colour[0]) + 0.587 * f64::from(colour[1]) + 0.114 * f64::from(colour[2]);
        let ink = if brightness > 140.0 { "#14181d" } else { "#ffffff" };
        let style = format!("text-anchor=\"middle\" fill=\"{ink}\"");
        *out += &text(x + width / 2.0, y + height / 2.0 + 4.3, &style, &label);
    }
}

fn shade_of(kind: Kind, shade: usize, shades: usize) -> [u8; 3] {
    let (dark, light) = colours(kind);
    let share = if shades > 1 { shade as f64 / (shades - 1) as f64 } else { 0.0 };
    std::array::from_fn(|at| (f64::from(dark[at]) * (1.0 - share) + f64::from(light[at]) * share).round() as u8)
}

fn hex([red, green, blue]: [u8; 3]) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn text(x: f64, y: f64, style: &str, content: &str) -> String {
    format!("<text x=\"{x:.2}\" y=\"{y:.2}\" {style}>{content}</text>\n")
}

/// Text for XML: names may come from file names. XML has no place for control characters at all.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}
