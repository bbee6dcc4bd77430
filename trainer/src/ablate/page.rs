//! The results as one HTML page that needs nothing else.

use super::plots::{COLORS, Curve, Scale, bar, escaped, lines};
use super::results::{CellResult, Point, Results, Verdict};
use super::table::{deviation, effect_name, percent, row, verdict};
use crate::metrics::in_units as bytes;
use std::collections::BTreeSet;
use std::fmt::Write as _;

const STYLE: &str = include_str!("page.css");

/// Width of a bar in a row.
const BAR: f64 = 96.0;

/// The page.
pub(crate) fn render(results: &Results) -> String {
    let bad = results.bad().count();
    let title = escaped(&format!("ferrotitan ablate {}", results.matrix));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<p class=\"{}\">{}</p>\n",
        if bad == 0 { "good" } else { "bad" },
        escaped(&verdict(results))
    );
    if !results.suspects.is_empty() {
        let suspects = escaped(&results.suspects.join(", "));
        let _ = writeln!(page, "<p class=\"bad\">Every failing cell has this, and no other cell: {suspects}</p>");
    }
    failures(results, &mut page);
    curves(results, &mut page);
    effects(results, &mut page);
    cells(results, &mut page);
    let _ = writeln!(page, "<p class=\"note\">ferrotitan {}</p></body></html>", results.version);
    page
}

fn failures(results: &Results, page: &mut String) {
    for cell in results.bad().filter(|cell| cell.why.is_some()) {
        let _ = writeln!(
            page,
            "<details open><summary class=\"bad\">{} {}: {}</summary><pre>{}</pre></details>",
            cell.verdict.word(),
            escaped(&cell.name),
            escaped(cell.why.as_deref().unwrap_or_default()),
            escaped(&cell.last_lines)
        );
    }
}

/// For each reference: the losses over each other, and how far each is off.
fn curves(results: &Results, page: &mut String) {
    let references: Vec<Option<&str>> = {
        let named: BTreeSet<Option<&str>> = results.cells.iter().map(|cell| cell.reference.as_deref()).collect();
        let has = |reference: &Option<&str>| {
            results.cells.iter().any(|cell| !cell.is_reference && cell.reference.as_deref() == *reference)
        };
        named.into_iter().filter(has).collect()
    };
    for reference in references {
        let of_group = |cell: &&CellResult| {
            !cell.curve.is_empty()
                && match cell.is_reference {
                    true => Some(cell.name.as_str()) == reference,
                    false => cell.reference.as_deref() == reference,
                }
        };
        let group: Vec<&CellResult> = results.cells.iter().filter(of_group).collect();
        let curve = |value: &dyn Fn(&Point) -> Option<f64>| -> Vec<Curve<'_>> {
            let drawn = group.iter().enumerate().map(|(index, cell)| Curve {
                name: &cell.name,
                points: cell.curve.iter().filter_map(|point| Some((point.step as f64, value(point)?))).collect(),
                color: if cell.verdict == Verdict::Deviates { "#d00000" } else { COLORS[index % COLORS.len()] },
                is_bold: cell.verdict == Verdict::Deviates || cell.is_reference,
            });
            drawn.collect()
        };
        let count = group.len();
        let what = match reference {
            Some(name) => format!("{count} curves: {name} and what is compared with it"),
            None => format!("{count} curves"),
        };
        let _ = writeln!(page, "<h2>{}</h2>", escaped(&what));
        let mut figure = |title: &str, scale, value: &dyn Fn(&Point) -> Option<f64>| {
            let picture = lines(title, scale, &curve(value));
            let _ = writeln!(page, "<figure><figcaption>{title}</figcaption>{picture}</figure>");
        };
        figure("Loss", Scale::Linear, &|point| Some(point.loss));
        figure("Gradient norm", Scale::Linear, &|point| Some(point.grad_norm));
        if reference.is_some() {
            figure("How far the loss is off", Scale::Log, &|point| point.deviation.map(|found| found.loss));
            figure("How far the gradient norm is off", Scale::Log, &|point| {
                point.deviation.map(|found| found.grad_norm)
            });
        }
    }
}

fn effects(results: &Results, page: &mut String) {
    if results.effects.is_empty() {
        return;
    }
    page.push_str(
        "<h2>By itself</h2>\n<p class=\"note\">Mean over all pairs of cells that differ in nothing else.</p>\n\
         <table><tr><th>axis<th class=\"n\">pairs<th colspan=\"2\">time of a step<th colspan=\"2\">peak memory of a \
         process<th colspan=\"2\">parameters, gradients and optimizer of a rank<th class=\"n\">sent a step</tr>\n",
    );
    let most = |of: &dyn Fn(&super::effects::Effect) -> f64| {
        results.effects.iter().map(|effect| of(effect).abs()).fold(f64::MIN_POSITIVE, f64::max)
    };
    let widest = [most(&|e| e.time_percent), most(&|e| e.memory_percent), most(&|e| e.state_percent)];
    for effect in &results.effects {
        let name = escaped(&effect_name(&effect.axis, &effect.value, &effect.against));
        let _ = write!(page, "<tr><td>{name}<td class=\"n\">{}", effect.pairs);
        for (value, widest) in
            [effect.time_percent, effect.memory_percent, effect.state_percent].into_iter().zip(widest)
        {
            let color = if value > 0.0 { COLORS[1] } else { COLORS[2] };
            let drawn = bar(BAR, &[(value.abs() / widest, color, percent(value))]);
            let _ = write!(page, "<td class=\"n\">{}<td>{drawn}", percent(value));
        }
        let _ = writeln!(page, "<td class=\"n\">{}</tr>", bytes(effect.bytes_per_step));
    }
    page.push_str("</table>\n");
}

/// The decades of a deviation that a bar can show.
const LEAST: f64 = 1e-17;

fn cells(results: &Results, page: &mut String) {
    let groups: BTreeSet<&String> =
        results.cells.iter().filter_map(|cell| cell.cost.as_ref()).flat_map(|cost| cost.bytes_sent.keys()).collect();
    let groups: Vec<&String> = groups.into_iter().collect();
    let color = |group: &String| COLORS[groups.iter().position(|known| *known == group).unwrap_or(0) % COLORS.len()];
    page.push_str("<h2>Cells</h2>\n<p class=\"note\">Sent a step, by the first rank, through its groups: ");
    for group in &groups {
        let _ = write!(page, "<span class=\"key\" style=\"background:{}\"></span>{} ", color(group), escaped(group));
    }
    page.push_str(
        ". Deviations are the largest of all steps, relative, on a scale of powers of ten.</p>\n<table><tr><th>cell\
         <th class=\"n\">ranks<th colspan=\"2\">loss off by<th colspan=\"2\">gradient norm off by<th colspan=\"2\">\
         tokens/s<th colspan=\"2\">peak memory<th colspan=\"2\">sent a step<th></tr>\n",
    );
    let costs = || results.cells.iter().filter_map(|cell| cell.cost.as_ref());
    let fastest = costs().map(|cost| cost.tokens_per_second).fold(f64::MIN_POSITIVE, f64::max);
    let largest = costs().map(|cost| cost.peak_memory as f64).fold(f64::MIN_POSITIVE, f64::max);
    let chattiest = costs().map(super::results::Cost::bytes_per_step).fold(f64::MIN_POSITIVE, f64::max);
    let decades = |value: f64| if value > LEAST { (value.log10() - LEAST.log10()).min(17.0) / 17.0 } else { 0.0 };
    for cell in &results.cells {
        let words = row(cell);
        let class = if cell.verdict.is_bad() { "bad" } else { "" };
        let settings = escaped(&cell.settings.join("\nthen "));
        let _ = write!(
            page,
            "<tr class=\"{class}\"><td title=\"{settings}\">{}<td class=\"n\">{}",
            escaped(&cell.name),
            cell.ranks
        );
        let shades = |value: f64, limit: f64| if value <= limit { COLORS[2] } else { "#d00000" };
        let mut cell_of = |words: &str, drawn: String| {
            let _ = write!(page, "<td class=\"n\">{}<td>{drawn}", escaped(words));
        };
        for (index, value, limit) in [
            (1, cell.deviation.map(|found| found.loss), cell.tolerance.map(|tolerance| tolerance.loss)),
            (2, cell.deviation.map(|found| found.grad_norm), cell.tolerance.map(|tolerance| tolerance.grad_norm)),
        ] {
            let drawn = value.map(|value| {
                let limit = limit.unwrap_or(f64::INFINITY);
                bar(
                    BAR,
                    &[(decades(value), shades(value, limit), format!("{}, at most {limit:.0e}", deviation(value)))],
                )
            });
            cell_of(&words[index], drawn.unwrap_or_default());
        }
        let cost = cell.cost.as_ref();
        let plain = |share: Option<f64>, words: &str| {
            share.map(|share| bar(BAR, &[(share, COLORS[0], words.to_owned())])).unwrap_or_default()
        };
        cell_of(&words[3], plain(cost.map(|cost| cost.tokens_per_second / fastest), &words[3]));
        cell_of(&words[4], plain(cost.map(|cost| cost.peak_memory as f64 / largest), &words[4]));
        let sent = cost.map(|cost| {
            let part = |(group, sent): (&String, &u64)| {
                let each = *sent as f64 / cost.steps.max(1) as f64;
                (each / chattiest, color(group), format!("{group}: {}", bytes(each)))
            };
            bar(BAR, &cost.bytes_sent.iter().map(part).collect::<Vec<_>>())
        });
        cell_of(&words[5], sent.unwrap_or_default());
        let _ = writeln!(page, "<td class=\"verdict\">{}</tr>", words[6]);
    }
    page.push_str("</table>\n");
}
