//! The last checkpoint as a Hugging Face model.

use anyhow::Context as _;
use ferrotitan_checkpoint::interchange::hugging_face::{Config, Export, Options};
use ferrotitan_checkpoint::{Checkpoint, Dtype, Item, Store, Which, save};
use ferrotitan_comm::DeviceMesh;
use ferrotitan_mesh::Mesh as _;

use crate::plan::ModelDtype;

/// Writes the model into `step-N-hf`, the ranks sharing its files. A file holds whole tensors, which no rank may have: so
/// the shards are saved beside it first, and read from there.
pub(super) fn hugging_face(
    store: &Store,
    mesh: &DeviceMesh,
    shape: &Config,
    step: u64,
    model: Vec<Item>,
    dtype: ModelDtype,
) -> anyhow::Result<()> {
    let (shards, target) = (store.below(&format!("step-{step}-shards")), store.below(&folder(step)));
    let world = mesh.world();
    if mesh.rank() == 0 {
        // An attempt that failed may have left some.
        shards.delete_folder("")?;
    }
    save(&shards, mesh, step, model, serde_json::Value::Null).context("saving the model's shards")?;
    let source = Checkpoint::open(&shards, Which::Step(step))?;
    let mut options = Options::new(shape.clone());
    options.dtype = Some(Dtype::of(dtype.kind())?);
    let export = Export::new(&source, &options)?;
    let first = mesh.rank() == 0;
    world.all_ok(if first { export.refuse_strangers(&target) } else { Ok(()) })?;
    let mut files = (mesh.rank()..export.files()).step_by(mesh.world_size());
    world.all_ok(files.try_for_each(|file| export.write_file(&target, file, &mut |_| {})))?;
    // The shards go once every rank has read what it needs.
    if first {
        export.finish(&target)?;
        shards.delete_folder("")?;
        tracing::info!("the model of step {step} is in {target}");
    }
    Ok(())
}

fn folder(step: u64) -> String {
    format!("step-{step}-hf")
}
