//! The tensors of a run, by the names that they have in a checkpoint.

use ferrotitan_checkpoint::{Item, Source};
use ferrotitan_mesh::Layout;
use ferrotitan_optim::AdamW;
use tch::Kind;

use crate::train::compose::Composition;

/// The parameters, in this dtype instead of their own if one is given.
pub(super) fn model(composition: &Composition, kind: Option<Kind>) -> anyhow::Result<Vec<Item>> {
    let item = |parameter: &ferrotitan_nn::Parameter| {
        let local = parameter.local()?.f_detach()?;
        let local = kind.map_or(Ok(local.shallow_clone()), |kind| local.f_to_kind(kind))?;
        Ok(Item::new(parameter.name(), parameter.layout(), local))
    };
    composition.parameters.iter().map(item).collect()
}

/// What the optimizer remembers of each parameter.
pub(super) fn optimizer(optimizer: &AdamW) -> anyhow::Result<Vec<Item>> {
    let mut items = Vec::new();
    for moments in optimizer.state() {
        let (name, layout) = (moments.parameter.name(), moments.parameter.layout());
        // The same number wherever the parameter is.
        let everywhere = Layout::replicated(&[]).held_by_stages(layout.stages());
        items.push(Item::new(format!("optimizer.step.{name}"), everywhere, moments.step.shallow_clone()));
        items.push(Item::new(format!("optimizer.exp_avg.{name}"), layout.clone(), moments.exp_avg.shallow_clone()));
        items.push(Item::new(format!("optimizer.exp_avg_sq.{name}"), layout, moments.exp_avg_sq.shallow_clone()));
    }
    Ok(items)
}

/// What stands before the names of magnitudes.
#[cfg(feature = "float8")]
const AMAX: &str = "float8.amax";
/// The operands whose magnitudes are remembered, in `float8`'s order.
#[cfg(feature = "float8")]
const OPERANDS: [&str; 3] = ["input", "weight", "output_gradient"];

/// The magnitudes that delayed scaling remembers; they are the same on every rank of a stage.
#[cfg(feature = "float8")]
pub(super) fn float8(composition: &Composition) -> anyhow::Result<Vec<Item>> {
    let mut items = Vec::new();
    for (name, histories) in composition.float8_histories() {
        for (operand, history) in OPERANDS.iter().zip(histories) {
            if !history.is_empty() {
                let layout = Layout::replicated(&[history.len()]).held_by_stages(&composition.stages_of(&name));
                items.push(Item::new(format!("{AMAX}.{operand}.{name}"), layout, tch::Tensor::from_slice(&history)));
            }
        }
    }
    Ok(items)
}

#[cfg(not(feature = "float8"))]
pub(super) fn float8(_composition: &Composition) -> anyhow::Result<Vec<Item>> {
    Ok(Vec::new())
}

/// The magnitudes of this rank's projections that a checkpoint has, to be loaded and then given to
/// [`restore_float8`].
#[cfg(feature = "float8")]
pub(super) fn float8_in(source: &dyn Source, composition: &Composition) -> Vec<Item> {
    let mut items = Vec::new();
    for name in composition.float8_histories().keys() {
        for operand in OPERANDS {
            let amax = format!("{AMAX}.{operand}.{name}");
            // As many steps as anybody remembers.
            let steps = source.tensors().get(&amax).map(|info| info.shape.as_slice());
            if let Some(&[steps]) = steps
                && steps <= 1 << 16
            {
                let layout = Layout::replicated(&[steps]).held_by_stages(&composition.stages_of(name));
                items.push(Item::new(
                    amax,
                    layout,
                    tch::Tensor::zeros([steps as i64], (Kind::Float, tch::Device::Cpu)),
                ));
            }
        }
    }
    items
}

#[cfg(not(feature = "float8"))]
pub(super) fn float8_in(_source: &dyn Source, _composition: &Composition) -> Vec<Item> {
    Vec::new()
}

/// Puts loaded magnitudes back. Where there are none, scales start anew.
#[cfg(feature = "float8")]
pub(super) fn restore_float8(items: &[Item], composition: &Composition) -> anyhow::Result<()> {
    let mut histories = composition.float8_histories();
    for (name, operands) in &mut histories {
        for (operand, history) in OPERANDS.iter().zip(operands) {
            let amax = format!("{AMAX}.{operand}.{name}");
            if let Some(item) = items.iter().find(|item| item.name == amax) {
                *history = Vec::<f32>::try_from(&item.tensor)?;
            }
        }
    }
    composition.restore_float8(&histories)
}

#[cfg(not(feature = "float8"))]
pub(super) fn restore_float8(_items: &[Item], _composition: &Composition) -> anyhow::Result<()> {
    Ok(())
}
