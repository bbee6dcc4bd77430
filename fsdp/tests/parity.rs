//! A sharded model against the same model on one rank, in double precision.
#![allow(clippy::unwrap_used)]

mod model;

use ferrotitan_fsdp::nn::mesh::Degrees;
use ferrotitan_fsdp::{Options, Reshard};
use model::{Training, alone, assert_close, sharded, with_options};
use proptest::prelude::*;

fn meshes() -> impl Strategy<Value = Degrees> {
    (1_usize..=8, 1_usize..=8, 1_usize..=3).prop_filter_map("at most 8 ranks", |(dp_shard, dp_replicate, cp)| {
        let degrees = Degrees { dp_shard, dp_replicate, cp, ..Degrees::default() };
        (degrees.world_size() <= 8).then_some(degrees)
    })
}

fn policies(degrees: Degrees) -> impl Strategy<Value = Reshard> {
    let size = degrees.dp_shard * degrees.cp;
    let divisors: Vec<usize> = (1..=size).filter(|ranks| size.is_multiple_of(*ranks)).collect();
    prop_oneof![
        2 => Just(Reshard::Default),
        1 => Just(Reshard::Always),
        1 => Just(Reshard::Never),
        1 => prop::sample::select(divisors).prop_map(Reshard::Ranks),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20, failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn every_mesh_trains_the_same_model(
        (degrees, reshard) in meshes().prop_flat_map(|degrees| (Just(degrees), policies(degrees))),
        accumulation in 1_usize..=4,
        reduces_each: bool,
        checkpoint: bool,
        tied: bool,
        grouped: bool,
        vocabulary in 20_usize..50,
    ) {
        let rows = degrees.world_size() * accumulation + 1;
        let training = Training { accumulation, reduces_each, checkpoint, tied, vocabulary, rows, ..Training::default() };
        let mut options = Options { reshard_after_forward: reshard, ..Options::default() };
        if !grouped {
            options.groups.clear();
        }
        assert_close(&sharded(&training, degrees, with_options(&options)), &alone(&training), 1e-10);
    }
}
