//! A cell: what is run, and what it is compared with.

use crate::config::Flag;
use crate::plan::Plan;

/// How far a cell may be from its reference, relative to it.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(crate) struct Tolerance {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
}

/// One cell, or a reference.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    /// Its name, which is also that of its folder.
    pub(crate) name: String,
    /// The values of the axes that it is made of; none for a cell of its own.
    pub(crate) values: Vec<(String, String)>,
    /// The settings of its runs, one after the other, over the base.
    pub(crate) runs: Vec<Vec<Flag>>,
    /// The reference that it is compared with, if with any.
    pub(crate) reference: Option<String>,
    pub(crate) tolerance: Option<Tolerance>,
    /// Whether it is a reference itself.
    pub(crate) is_reference: bool,
    /// What each of its runs means.
    pub(crate) plans: Vec<Plan>,
    /// Why it is not run, for a cell that no run can be.
    pub(crate) illegal: Option<String>,
}

impl Cell {
    /// Its folder in the results.
    pub(crate) fn folder(&self) -> String {
        format!("{}/{}", if self.is_reference { "references" } else { "cells" }, self.name)
    }

    /// The most ranks of any of its runs.
    pub(crate) fn ranks(&self) -> usize {
        self.plans.iter().map(|plan| plan.degrees.world_size()).max().unwrap_or(1)
    }

    /// The step that its last run ends with.
    pub(crate) fn steps(&self) -> u64 {
        self.plans.last().map_or(0, |plan| plan.steps)
    }
}
