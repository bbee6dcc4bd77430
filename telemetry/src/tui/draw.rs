//! How the live view looks.

use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, LineGauge, Paragraph, Row, Sparkline, Table};

use super::view::State;
use crate::metrics::table::{
    DATA_SHARE, GRAD_NORM, LEARNING_RATE, LOSS, MEMORY_PROCESS, MEMORY_RESERVED, MEMORY_RESERVED_SHARE, MFU, Metric,
    STEP_TIME, TFLOPS, THROUGHPUT,
};

/// Draws the whole view.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State, now: Instant) {
    let area = frame.area();
    // Ranks get what they need, as long as the curve and some lines have room.
    let ranks = u16::try_from(state.ranks.len()).unwrap_or(u16::MAX).saturating_add(3).min(area.height / 3);
    let [head, above, ranks, lines, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Fill(3),
        Constraint::Length(if state.ranks.is_empty() { 0 } else { ranks }),
        Constraint::Fill(2),
        Constraint::Length(1),
    ])
    .areas(area);
    let [curve, side] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(32)]).areas(above);
    let [numbers, rate] = Layout::vertical([Constraint::Fill(1), Constraint::Length(4)]).areas(side);
    draw_head(frame, head, state, now);
    draw_curve(frame, curve, state);
    draw_numbers(frame, numbers, state);
    draw_rate(frame, rate, state);
    draw_ranks(frame, ranks, state, now);
    draw_lines(frame, lines, state);
    frame.render_widget(Paragraph::new("q leaves this view; the run goes on").style(faint()), foot);
}

fn faint() -> Style {
    Style::new().fg(Color::DarkGray)
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, state: &State, now: Instant) {
    let elapsed = now.saturating_duration_since(state.began);
    let done = if state.steps == 0 { 0.0 } else { (state.step as f64 / state.steps as f64).clamp(0.0, 1.0) };
    let text = format!("{}  step {}/{}  {}", state.title, state.step, state.steps, clock(elapsed));
    let width = u16::try_from(text.chars().count()).unwrap_or(u16::MAX).saturating_add(2);
    let [text_area, bar] = Layout::horizontal([Constraint::Length(width), Constraint::Fill(1)]).areas(area);
    frame.render_widget(Line::from(text).style(Style::new().add_modifier(Modifier::BOLD)), text_area);
    frame.render_widget(LineGauge::default().ratio(done).filled_style(Style::new().fg(Color::Green)), bar);
}

fn draw_curve(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let title = match state.values.get(LOSS.name) {
        Some(loss) => format!(" loss {loss:.4} "),
        None => " loss ".to_owned(),
    };
    let block = Block::bordered().title(title);
    let (Some(first), Some(last)) = (state.losses.first(), state.losses.last()) else {
        frame.render_widget(Paragraph::new("no step yet").style(faint()).block(block), area);
        return;
    };
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for (_, loss) in &state.losses {
        (low, high) = (low.min(*loss), high.max(*loss));
    }
    // A curve that is flat so far has a middle to lie in.
    let margin = ((high - low) * 0.05).max(high.abs() * 1e-3).max(1e-9);
    let (low, high) = (low - margin, high + margin);
    let (from, to) = (first.0, last.0.max(first.0 + 1.0));
    let data = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .style(Style::new().fg(Color::Cyan))
        .data(&state.losses);
    let label = |value: f64| Span::from(format!("{value:.3}"));
    let chart = Chart::new(vec![data])
        .block(block)
        .x_axis(Axis::default().bounds([from, to]).labels([Span::from(from.to_string()), Span::from(to.to_string())]))
        .y_axis(Axis::default().bounds([low, high]).labels([label(low), label((low + high) / 2.0), label(high)]));
    frame.render_widget(chart, area);
}

fn draw_numbers(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let value = |metric: Metric| state.values.get(metric.name).copied();
    let gib = |bytes: f64| format!("{:.2} GiB", bytes / (1_u64 << 30) as f64);
    let memory = match (value(MEMORY_RESERVED), value(MEMORY_RESERVED_SHARE)) {
        (Some(bytes), Some(share)) => Some(("memory", format!("{} ({:.1} %)", gib(bytes), 100.0 * share))),
        (Some(bytes), None) => Some(("memory", gib(bytes))),
        (None, _) => value(MEMORY_PROCESS).map(|bytes| ("memory", gib(bytes))),
    };
    let rows = [
        value(THROUGHPUT).map(|rate| ("tokens/s", format!("{rate:.0}"))),
        value(TFLOPS).map(|rate| ("TFLOP/s", format!("{rate:.2}"))),
        value(MFU).map(|share| ("MFU", format!("{:.2} %", 100.0 * share))),
        memory,
        value(STEP_TIME).map(|seconds| ("step time", format!("{seconds:.3} s"))),
        value(DATA_SHARE).map(|share| ("data", format!("{:.1} %", 100.0 * share))),
        value(GRAD_NORM).map(|norm| ("grad norm", format!("{norm:.4}"))),
        value(LEARNING_RATE).map(|rate| ("lr", format!("{rate:.3e}"))),
    ];
    let rows = rows.into_iter().flatten().map(|(name, value)| Row::new([name.to_owned(), value]));
    let table = Table::new(rows, [Constraint::Length(10), Constraint::Fill(1)]);
    frame.render_widget(table.block(Block::bordered().title(" last step ")), area);
}

fn draw_rate(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let block = Block::bordered().title(" tokens/s ");
    let width = usize::from(block.inner(area).width);
    let skip = state.rates.len().saturating_sub(width);
    // A rate that is not finite has no height.
    let rates = state.rates.iter().skip(skip).map(|rate| *rate as u64);
    let line = Sparkline::default().data(rates).style(Style::new().fg(Color::Blue));
    frame.render_widget(line.block(block), area);
}

fn draw_ranks(frame: &mut Frame<'_>, area: Rect, state: &State, now: Instant) {
    let widths = [
        Constraint::Length(4),
        Constraint::Fill(2),
        Constraint::Length(7),
        Constraint::Length(20),
        Constraint::Length(7),
        Constraint::Fill(3),
    ];
    let rows = state.ranks.iter().map(|(rank, (doing, since))| {
        let since = now.saturating_duration_since(*since);
        let style = match since.as_secs() {
            0..10 => Style::new(),
            10..60 => Style::new().fg(Color::Yellow),
            _ => Style::new().fg(Color::Red),
        };
        let cells = [
            rank.to_string(),
            doing.place.clone(),
            doing.step.to_string(),
            doing.phase.to_string(),
            clock(since),
            doing.collective.clone(),
        ];
        Row::new(cells).style(style)
    });
    let header = Row::new(["rank", "place", "step", "does", "since", "last collective"]).style(faint());
    frame.render_widget(Table::new(rows, widths).header(header).block(Block::bordered().title(" ranks ")), area);
}

fn draw_lines(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let block = Block::bordered().title(" log ");
    let skip = state.lines.len().saturating_sub(usize::from(block.inner(area).height));
    let lines: Vec<Line<'_>> = state.lines.iter().skip(skip).map(|line| Line::from(line.as_str())).collect();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// `3.2 s`, `4:05`, `1:02:03`.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, _) => format!("{:.1} s", time.as_secs_f64()),
        (0, minutes, seconds) => format!("{minutes}:{seconds:02}"),
        (hours, minutes, seconds) => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::view::{RankState, View};
    use super::*;
    use crate::report::Phase;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn drawn(view: &View, width: u16, height: u16, later: Duration) -> TestBackend {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &view.state(), Instant::now() + later)).unwrap();
        terminal.backend().clone()
    }

    fn run() -> View {
        let view = View::new("debugmodel", 200);
        for step in 1..=100_u64 {
            let loss = 8.0 / (step as f64).sqrt();
            let rate = if step == 50 { f64::NAN } else { 1000.0 + step as f64 };
            view.step(
                step,
                &[LOSS.is(loss), THROUGHPUT.is(rate), MFU.is(0.4), MEMORY_RESERVED.is(3.0 * (1_u64 << 29) as f64)],
            );
        }
        for rank in 0..4 {
            let place = format!("pp {}, tp {}", rank / 2, rank % 2);
            let collective = "all-reduce #182 on tp".to_owned();
            view.rank(rank, RankState { place, step: 101, phase: Phase::Forward, collective });
        }
        view.state().open = true;
        view.line("the last line");
        view
    }

    #[test]
    fn everything_is_shown() {
        let screen = drawn(&run(), 120, 40, Duration::from_secs(75)).to_string();
        for text in [
            "debugmodel  step 100/200  1:15",
            "loss 0.8000",
            "tokens/s   1100",
            "MFU        40.00 %",
            "memory     1.50 GiB",
            "101     in the forward pass  1:15    all-reduce #182 on tp",
            "the last line",
            "q leaves this view",
        ] {
            assert!(screen.contains(text), "no {text:?} in\n{screen}");
        }
        // The curve is drawn in dots, and falls: there are some at the upper left and none at the upper right.
        let rows: Vec<Vec<char>> = screen.lines().map(|line| line.chars().collect()).collect();
        let dots = |row: &[char]| row.iter().any(|c| ('\u{2801}'..='\u{28ff}').contains(c));
        assert!(rows[2..12].iter().any(|row| dots(&row[8..30])), "{screen}");
        assert!(!rows[2..12].iter().any(|row| dots(&row[50..86])), "{screen}");
    }

    #[test]
    fn any_size_and_any_numbers_can_be_drawn() {
        let empty = View::new("", 0);
        let odd = View::new("t".repeat(70_000), u64::MAX);
        let values = [f64::NAN, f64::INFINITY, f64::MIN, f64::MAX, -1.0, 0.0];
        for (step, value) in values.into_iter().enumerate() {
            odd.step(step as u64, &[LOSS.is(value), THROUGHPUT.is(value), MEMORY_RESERVED.is(value)]);
        }
        for view in [&run(), &empty, &odd] {
            for (width, height) in [(0, 0), (1, 1), (10, 3), (40, 10), (80, 24), (300, 100)] {
                drawn(view, width, height, Duration::from_secs(4000));
            }
        }
    }

    #[test]
    fn times_are_short() {
        let clock = |seconds| clock(Duration::from_secs_f64(seconds));
        assert_eq!([clock(3.21), clock(245.0), clock(3723.0)], ["3.2 s", "4:05", "1:02:03"]);
    }
}
