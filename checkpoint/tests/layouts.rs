//! From any layout on any mesh to any layout on any other, bit for bit.

#![allow(clippy::unwrap_used, missing_docs)]

mod shards;

use std::time::Duration;

use ferrotitan_checkpoint::comm::{BoxError, DeviceMesh, threads};
use ferrotitan_checkpoint::mesh::{Degrees, Dim, Layout, Mesh, Parts, View};
use ferrotitan_checkpoint::{
    Checkpoint, Dtype, Item, LoadOptions, Mode, SaveOptions, Saver, Source, Store, Which, load,
};
use proptest::prelude::*;
use shards::Global;

type Body = Result<(), BoxError>;

fn run(degrees: Degrees, body: impl Fn(&DeviceMesh) -> Body + Sync) -> Result<(), TestCaseError> {
    let options = threads::Options { timeout: Duration::from_secs(30), ..threads::Options::default() };
    threads::run(degrees, &options, |mesh| body(&mesh)).map_err(|error| TestCaseError::fail(error.to_string()))?;
    Ok(())
}

/// A mesh of 1 to 8 ranks, over any dimensions.
fn degrees() -> impl Strategy<Value = Degrees> {
    prop::collection::vec((0_usize..5, 2_usize..4), 0..3).prop_map(|factors| {
        let mut degrees = Degrees::default();
        for (dim, size) in factors {
            let larger = degrees.with(Dim::ALL[dim], size);
            if larger.world_size() <= 8 {
                degrees = larger;
            }
        }
        degrees
    })
}

/// What decides a layout, whatever the shape and the mesh turn out to be.
#[derive(Clone, Debug)]
struct Choice {
    splits: Vec<(usize, usize, u8, Vec<usize>)>,
    stages: Vec<usize>,
}

fn choice() -> impl Strategy<Value = Choice> {
    let split = (1_usize..16, 0_usize..4, 0_u8..4, prop::collection::vec(0_usize..8, 8));
    (prop::collection::vec(split, 0..4), prop::collection::vec(0_usize..3, 1..3))
        .prop_map(|(splits, stages)| Choice { splits, stages })
}

impl Choice {
    fn layout(&self, shape: &[usize], degrees: &Degrees) -> Layout {
        let mut layout = Layout::replicated(shape);
        for (dims, axis, kind, cuts) in &self.splits {
            // The four dimensions besides the stages', as a set.
            let view: View =
                Dim::ALL[1..].iter().enumerate().filter(|(i, _)| dims >> i & 1 == 1).map(|(_, d)| *d).collect();
            if shape.is_empty() || view.overlaps(layout.split_view()) {
                continue;
            }
            let axis = axis % shape.len();
            let parts = parts(*kind, cuts, shape[axis], degrees.size(view));
            layout = layout.shard(view, axis, parts).unwrap();
        }
        let mut stages: Vec<usize> = self.stages.iter().map(|stage| stage % degrees.get(Dim::Pp)).collect();
        stages.dedup();
        layout.held_by_stages(&stages)
    }
}

fn parts(kind: u8, cuts: &[usize], length: usize, size: usize) -> Parts {
    match kind {
        // Cuts anywhere: parts of any length, also none.
        0 => {
            let mut cuts: Vec<usize> = cuts[..size - 1].iter().map(|cut| cut % (length + 1)).collect();
            cuts.push(length);
            cuts.sort_unstable();
            let mut start = 0;
            Parts::At(cuts.into_iter().map(|end| std::mem::replace(&mut start, end)..end).collect())
        }
        // Every part twice: pairs of ranks are replicas.
        1 if size.is_multiple_of(2) && length > 0 => Parts::groups(1, length, size).unwrap(),
        // In reverse order.
        2 if length >= size => {
            let base = length / size;
            Parts::At((0..size).rev().map(|i| i * base..if i + 1 == size { length } else { (i + 1) * base }).collect())
        }
        _ => Parts::Even,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_to_any_layout(
        saving in degrees(),
        loading in degrees(),
        tensors in prop::collection::vec(
            (0..Dtype::ALL.len(), prop::collection::vec(0_usize..9, 0..4), choice(), choice()), 1..6
        ),
        file_bytes in 1_usize..600,
        mode in prop::sample::select(vec![Mode::Sync, Mode::Async]),
        seed in any::<u64>(),
    ) {
        let globals: Vec<_> = tensors.iter().enumerate().map(|(index, (dtype, shape, from, to))| {
            let global = Global::new(&format!("t{index}"), Dtype::ALL[*dtype], shape, seed ^ index as u64);
            (global, from.layout(shape, &saving), to.layout(shape, &loading))
        }).collect();
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();

        run(saving, |mesh| {
            let options = SaveOptions { mode, file_bytes, ..SaveOptions::default() };
            let mut saver = Saver::new(store.clone(), mesh.clone(), options);
            let held = globals.iter().filter(|(_, from, _)| from.is_held(mesh));
            let mut items: Vec<Item> = held.map(|(global, from, _)| global.item(from, mesh)).collect();
            let given = items.iter().map(|item| Item::new(&item.name, item.layout.clone(), item.tensor.shallow_clone()));
            saver.save(7, given.collect::<Vec<_>>(), serde_json::json!({"seed": seed}))?;
            if mode == Mode::Async {
                // What training does meanwhile must not show.
                for item in &mut items {
                    let _ = item.tensor.zero_();
                }
            }
            saver.finish()?;
            Ok(())
        })?;

        let checkpoint = Checkpoint::open(&store, Which::Latest).unwrap();
        prop_assert_eq!(checkpoint.step(), 7);
        prop_assert_eq!(&checkpoint.state()["seed"], seed);
        checkpoint.verify(|_| ()).unwrap();
        for (global, ..) in &globals {
            let info = &checkpoint.tensors()[&global.name];
            prop_assert_eq!((&info.shape, info.dtype), (&global.shape, global.dtype));
            prop_assert!(global.is_in(&checkpoint).unwrap());
        }
        run(loading, |mesh| {
            let items: Vec<_> = globals.iter().map(|(global, _, to)| global.blank(to, mesh)).collect();
            let given = items.iter().map(|item| Item::new(&item.name, item.layout.clone(), item.tensor.shallow_clone()));
            load(&checkpoint, given, mesh, &LoadOptions { exact: true, ..LoadOptions::default() })?;
            for ((global, ..), item) in globals.iter().zip(&items) {
                if item.layout.is_held(mesh) && !global.matches(item, mesh) {
                    return Err(format!("{} differs on rank {}", global.name, mesh.rank()).into());
                }
            }
            Ok(())
        })?;
    }
}
