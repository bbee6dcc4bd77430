//! Two ranks save a tensor of which each holds half of the rows, and load half of its columns each. Run with
//! `cargo run -p ferrotitan-checkpoint --example two_ranks`.

#![allow(clippy::print_stdout)]

use std::error::Error;

use ferrotitan_checkpoint::comm::threads;
use ferrotitan_checkpoint::mesh::{Degrees, Layout, Mesh, Parts, View};
use ferrotitan_checkpoint::{Checkpoint, Item, LoadOptions, Source, Store, Which, load, save};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let address = folder.path().to_string_lossy().into_owned();
    let two = Degrees { tp: 2, ..Degrees::default() };

    threads::run(two, &threads::Options::default(), |mesh| {
        let rows = Layout::replicated(&[4, 6]).shard(View::TP, 0, Parts::Even)?;
        let half = Tensor::full([2, 6], mesh.rank() as f64, (Kind::Float, Device::Cpu));
        let store = Store::open(&address)?;
        let item = Item::new("weight", rows, half);
        save(&store, &mesh, 10, [item], serde_json::json!({"tokens": 4096}))?;
        Ok::<_, Box<dyn Error + Send + Sync>>(())
    })?;

    let checkpoint = Checkpoint::open(&Store::open(&address)?, Which::Latest)?;
    println!("step {} with {}: {:?}", checkpoint.step(), checkpoint.state(), checkpoint.tensors());

    threads::run(two, &threads::Options::default(), |mesh| {
        let columns = Layout::replicated(&[4, 6]).shard(View::TP, 1, Parts::Even)?;
        let half = Tensor::zeros([4, 3], (Kind::Float, Device::Cpu));
        let item = Item::new("weight", columns, half.shallow_clone());
        load(&checkpoint, [item], &mesh, &LoadOptions::default())?;
        println!("rank {} has the columns\n{half}", mesh.rank());
        Ok::<_, Box<dyn Error + Send + Sync>>(())
    })?;
    Ok(())
}
