//! From a matrix to its cells, each of them checked before the first is run.

use super::cell::Cell;
use super::matrix::Matrix;
use super::variant::Variant;
use crate::config::check::Surroundings;
use crate::config::{Flag, Loaded, Problem};
use crate::plan::Plan;
use std::collections::BTreeMap;

/// More cells than anybody would wait for.
const MOST: usize = 10_000;

impl Matrix {
    /// The references, then the cells. Those that no run can be are left out where the matrix says so.
    ///
    /// # Errors
    /// All mistakes, in words, each once.
    pub(crate) fn cells(&self, around: &Surroundings) -> Result<Vec<Cell>, Vec<String>> {
        let combinations = self.axes.iter().try_fold(1_usize, |n, axis| n.checked_mul(axis.values.len()));
        if combinations.is_none_or(|n| n > MOST) {
            return Err(vec![format!("the axes make more than {MOST} cells")]);
        }
        let mut mistakes: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut cells = self.written();
        if let Some(twice) = cells.iter().find(|cell| {
            cells.iter().filter(|other| (&other.name, other.is_reference) == (&cell.name, cell.is_reference)).count()
                > 1
        }) {
            return Err(vec![format!("there are two cells called {}", twice.name)]);
        }
        for cell in &mut cells {
            let mut wrong = Vec::new();
            for settings in &cell.runs {
                match self.plan(settings, around) {
                    Ok(plan) => cell.plans.push(plan),
                    Err(problems) => wrong.extend(problems.iter().map(in_words)),
                }
            }
            let excused = |text: &String| self.skip_illegal.iter().any(|words| text.contains(words));
            if !cell.is_reference && !wrong.is_empty() && wrong.iter().all(excused) {
                cell.illegal = Some(wrong.join("; "));
                continue;
            }
            for text in wrong {
                let cells = mistakes.entry(text).or_default();
                if cells.last() != Some(&cell.name) {
                    cells.push(cell.name.clone());
                }
            }
        }
        if mistakes.is_empty() {
            return Ok(cells);
        }
        let told = mistakes.into_iter().map(|(text, cells)| {
            let more = if cells.len() > 3 { format!(" and {} more", cells.len() - 3) } else { String::new() };
            let named = cells.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(", ");
            format!("{named}{more}: {text}")
        });
        Err(told.collect())
    }

    /// The cells as they are written, not yet checked.
    fn written(&self) -> Vec<Cell> {
        let cell = |name: &str, settings: Vec<Flag>| Cell {
            name: name.to_owned(),
            values: Vec::new(),
            runs: vec![self.common.iter().cloned().chain(settings).collect()],
            reference: None,
            tolerance: None,
            is_reference: false,
            plans: Vec::new(),
            illegal: None,
        };
        let mut cells = Vec::new();
        for (name, variant) in &self.references {
            cells.push(Cell { is_reference: true, ..cell(name, variant.settings.clone()) });
        }
        for values in self.combinations() {
            let name = combined_name(&values);
            let settings = values.iter().flat_map(|(_, _, variant)| variant.settings.clone()).collect();
            let reference = values.iter().find_map(|(_, _, variant)| variant.reference.as_deref());
            let reference = self.reference_of(reference);
            let tolerance = reference.and_then(|(_, variant)| variant.tolerance);
            let values = values.iter().map(|(axis, value, _)| ((*axis).to_owned(), (*value).to_owned())).collect();
            let reference = reference.map(|(name, _)| name.clone());
            cells.push(Cell { values, reference, tolerance, ..cell(&name, settings) });
        }
        for variant in &self.cells {
            let reference = self.reference_of(variant.reference.as_deref());
            let tolerance = variant.tolerance.or_else(|| reference.and_then(|(_, variant)| variant.tolerance));
            let mut own = cell(variant.name.as_deref().unwrap_or_default(), variant.settings.clone());
            for further in &variant.then {
                own.runs.push(own.runs[0].iter().chain(further).cloned().collect());
            }
            cells.push(Cell { reference: reference.map(|(name, _)| name.clone()), tolerance, ..own });
        }
        cells
    }

    /// The reference of this name, or the default one.
    fn reference_of(&self, name: Option<&str>) -> Option<&(String, Variant)> {
        match name.or(self.reference.as_deref()) {
            Some(name) => self.references.iter().find(|(reference, _)| reference == name),
            None => self.references.first(),
        }
    }

    /// All combinations of the axes' values that are not excluded, the last axis changing fastest.
    fn combinations(&self) -> Vec<Vec<(&str, &str, &Variant)>> {
        if self.axes.is_empty() {
            return Vec::new();
        }
        let mut all = vec![Vec::new()];
        for axis in &self.axes {
            let mut longer = Vec::new();
            for before in &all {
                for (value, variant) in &axis.values {
                    let mut values: Vec<(&str, &str, &Variant)> = before.clone();
                    values.push((axis.name.as_str(), value.as_str(), variant));
                    longer.push(values);
                }
            }
            all = longer;
        }
        let excluded = |values: &Vec<(&str, &str, &Variant)>| {
            self.exclude.iter().any(|combination| {
                combination
                    .iter()
                    .all(|(axis, value)| values.iter().any(|(own_axis, own, _)| own_axis == axis && own == value))
            })
        };
        all.retain(|values| !excluded(values));
        all
    }

    fn plan(&self, settings: &[Flag], around: &Surroundings) -> Result<Plan, Vec<Problem>> {
        let loaded = Loaded::from_text(&self.base.0, &self.base.1, settings);
        let planned = Plan::new(&loaded.config, around);
        let problems = loaded.with(planned.as_ref().err().cloned().unwrap_or_default());
        match planned {
            Ok((plan, _)) if problems.is_empty() => Ok(plan),
            _ => Err(problems),
        }
    }
}

/// What is on, or else each axis with its value.
fn combined_name(values: &[(&str, &str, &Variant)]) -> String {
    let parts: Vec<String> = values
        .iter()
        .filter(|(_, value, _)| *value != "off")
        .map(|(axis, value, _)| if *value == "on" { (*axis).to_owned() } else { format!("{axis}={value}") })
        .collect();
    if parts.is_empty() { "all-off".to_owned() } else { parts.join("+") }
}

fn in_words(problem: &Problem) -> String {
    let help = problem.help.as_ref().map(|help| format!("; {help}")).unwrap_or_default();
    format!("{}{help}", problem.message)
}
