//! Many runs of one config that differ in a few settings, and what the settings change.
//!
//! [`matrix`] reads what is to be run and [`expand`] makes cells of it; [`pool`] runs them as child processes,
//! [`measure`] reads what they wrote, [`compare`] holds it against a reference, [`effects`] asks what each setting does by
//! itself, and [`table`], [`page`] and `results.json` tell of it.

pub(crate) mod cell;
pub(crate) mod commands;
pub(crate) mod compare;
mod effects;
pub(crate) mod expand;
pub(crate) mod matrix;
mod measure;
pub(crate) mod page;
mod plots;
pub(crate) mod pool;
mod record;
pub(crate) mod results;
pub(crate) mod table;
mod variant;

/// The language of a matrix, for `--help`.
pub(crate) const LANGUAGE: &str = include_str!("language.txt");
