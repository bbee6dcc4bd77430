//! What the address of a checkpoint means.

use ferrotitan_checkpoint::interchange::{Opened, open};
use ferrotitan_checkpoint::{Result, Store, Which};

/// Opens what an address names: a folder of checkpoints, of which the latest is meant unless `step` says which; the folder
/// of one step, `…/step-10`; a Hugging Face model; or a distributed checkpoint of PyTorch.
///
/// # Errors
/// When there is none, or it cannot be read.
pub(crate) fn open_at(address: &str, step: Option<u64>) -> Result<Opened> {
    let (folder, named) = split(address);
    let opened = match (named, step) {
        (_, Some(step)) => open(&Store::open(address)?, Which::Step(step))?,
        (None, None) => open(&Store::open(address)?, Which::Latest)?,
        // TorchTitan's folders have such names, too, and are no folder of ours.
        (Some(named), None) => match open(&Store::open(folder)?, Which::Step(named)) {
            Ok(opened @ Opened::Native(_)) => opened,
            first => match open(&Store::open(address)?, Which::Latest) {
                Ok(opened) => opened,
                Err(_) => first?,
            },
        },
    };
    // Whole states of training begin the names of their models alike.
    let whole_state = |name: &String| name.starts_with("model.");
    Ok(match opened {
        Opened::Dcp(folder) if ferrotitan_checkpoint::Source::tensors(&*folder).keys().any(whole_state) => {
            Opened::Dcp(Box::new(folder.under("model.")))
        }
        opened => opened,
    })
}

/// The folder of checkpoints, and the step, of `…/step-10`.
fn split(address: &str) -> (&str, Option<u64>) {
    let address = address.trim_end_matches('/');
    let (folder, name) = address.rsplit_once('/').unwrap_or((".", address));
    match name.strip_prefix("step-").and_then(|step| step.parse().ok()) {
        Some(step) => (folder, Some(step)),
        None => (address, None),
    }
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn a_step_is_named_by_its_folder() {
        assert_eq!(split("s3://bucket/run/step-10/"), ("s3://bucket/run", Some(10)));
        assert_eq!(split("step-0"), (".", Some(0)));
        assert_eq!(split("out/checkpoint"), ("out/checkpoint", None));
        assert_eq!(split("out/step-ten"), ("out/step-ten", None));
    }
}
