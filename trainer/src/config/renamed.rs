//! Keys that TorchTitan called otherwise before 0.2, or calls otherwise in one of its 0.2 releases: a file that has them
//! reads as if it had today's.

use super::problem::{Origin, Problem};
use super::tree::{self, Content, Table};

/// Older name, today's name. A section's row stands below those of its keys that went elsewhere.
const RENAMED: &[(&str, &str)] = &[
    ("job.print_args", "job.print_config"),
    ("experimental.custom_args_module", "job.custom_config_module"),
    ("lr_scheduler.lr_min", "lr_scheduler.min_lr_factor"),
    ("training.batch_size", "training.local_batch_size"),
    ("training.compile", "compile.enable"),
    ("training.seed", "debug.seed"),
    ("training.deterministic", "debug.deterministic"),
    ("checkpoint.enable_checkpoint", "checkpoint.enable"),
    ("checkpoint.model_weights_only", "checkpoint.last_save_model_only"),
    ("memory_estimation.enabled", "memory_estimation.enable"),
    ("validation.enabled", "validation.enable"),
    ("float8.moe_fqns_prototype", "quantize.grouped_mm.float8.fqns"),
    ("mx.moe_fqns_prototype", "quantize.grouped_mm.mx.fqns"),
    ("float8", "quantize.linear.float8"),
    ("mx", "quantize.linear.mx"),
    ("quantize.linear.fp8", "quantize.linear.float8"),
    ("quantize.dense", "quantize.linear"),
    ("quantize.moe", "quantize.grouped_mm"),
];

/// Today's name of a path.
pub(crate) fn current(path: &str) -> String {
    for (old, new) in RENAMED {
        match path.strip_prefix(old) {
            Some("") => return (*new).to_owned(),
            Some(rest) if rest.starts_with('.') => return format!("{new}{rest}"),
            _ => {}
        }
    }
    path.to_owned()
}

/// Moves what stands under older names to today's.
pub(super) fn apply(table: &mut Table, problems: &mut Vec<Problem>) {
    for (old, new) in RENAMED {
        if let Some(node) = tree::remove(table, old) {
            put(table, old, new, node, problems);
        }
    }
}

fn put(table: &mut Table, old: &str, new: &str, node: tree::Node, problems: &mut Vec<Problem>) {
    match (node.content, tree::get(table, new)) {
        (content, None) => tree::insert(table, new, tree::Node { content, ..node }),
        (Content::Table(inner), Some(tree::Node { content: Content::Table(_), .. })) => {
            for (name, node) in inner {
                put(table, &format!("{old}.{name}"), &format!("{new}.{name}"), node, problems);
            }
        }
        (_, Some(present)) => problems.push(both(old, new, node.origin, present.origin.clone())),
    }
}

fn both(old: &str, new: &str, old_origin: Origin, new_origin: Origin) -> Problem {
    let mut problem = Problem::new(&[new, old], format!("`{old}` is the older name of `{new}`, and both are set"));
    problem.places = vec![(old.to_owned(), old_origin), (new.to_owned(), new_origin)];
    problem.help(format!("keep `{new}` alone"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::section;

    #[test]
    fn every_new_name_is_a_key_and_no_old_one_is() {
        for (old, new) in RENAMED {
            assert!(section::find(new).is_some(), "{new} is no key");
            assert!(section::find(old).is_none(), "{old} is a key");
        }
    }

    #[test]
    fn the_inner_row_comes_first() {
        assert_eq!(current("float8.moe_fqns_prototype"), "quantize.grouped_mm.float8.fqns");
        assert_eq!(current("float8.filter_fqns"), "quantize.linear.float8.filter_fqns");
        assert_eq!(current("float8x.filter_fqns"), "float8x.filter_fqns");
    }
}
