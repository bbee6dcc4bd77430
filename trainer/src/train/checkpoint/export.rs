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
    let shards = store.below(&format!("step-{step}-shards"));
    save(&shards, mesh, step, model, serde_json::Value::Null).context("saving the model's shards")?;
    let written = write(&shards, store, mesh, shape, step, dtype);
    // Every rank has read what it needs, or has failed, before the shards go.
    let agreed = written.and_then(|()| Ok(mesh.world().barrier()?));
    if mesh.rank() == 0 && agreed.is_ok() {
        shards.delete_folder("")?;
        tracing::info!("the model of step {step} is in {}", store.below(&folder(step)));
    }
    agreed
}

fn folder(step: u64) -> String {
    format!("step-{step}-hf")
}

fn write(
    shards: &Store,
    store: &Store,
    mesh: &DeviceMesh,
    shape: &Config,
    step: u64,
    dtype: ModelDtype,
) -> anyhow::Result<()> {
    let source = Checkpoint::open(shards, Which::Step(step))?;
    let mut options = Options::new(shape.clone());
    options.dtype = Some(Dtype::of(dtype.kind())?);
    let target = store.below(&folder(step));
    let export = Export::new(&source, &options)?;
    for file in (mesh.rank()..export.files()).step_by(mesh.world_size()) {
        export.write_file(&target, file, &mut |_| {})?;
    }
    mesh.world().barrier()?;
    if mesh.rank() == 0 {
        export.finish(&target)?;
    }
    Ok(())
}
