//! Groups of consecutive ranks of a view's group.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use ferrotitan_comm::mesh::{Degrees, Mesh, View};
use ferrotitan_comm::{BoxError, Error, ReduceOp, threads};

#[test]
fn a_block_is_consecutive_ranks_of_a_view() {
    let degrees = Degrees { dp_shard: 6, tp: 2, ..Degrees::default() };
    let options = threads::Options { timeout: Duration::from_secs(30), ..threads::Options::default() };
    let ran = threads::run(degrees, &options, |mesh| {
        let (block, index) = (mesh.block(View::DP_SHARD, 3)?, mesh.index(View::DP_SHARD));
        let all = mesh.ranks(View::DP_SHARD);
        assert_eq!(block.ranks(), &all[index / 3 * 3..][..3]);
        assert_eq!((block.name(), block.rank()), ("dp_shard:3", index % 3));
        let sum: usize = block.ranks().iter().sum();
        assert_eq!(block.all_reduce_scalar(mesh.rank() as f64, ReduceOp::Sum)?, sum as f64);
        // All of them are the view's own group, and one alone is the identity.
        assert_eq!(mesh.block(View::DP_SHARD, 6)?.ranks(), mesh.group(View::DP_SHARD)?.ranks());
        assert_eq!(mesh.block(View::DP_SHARD, 1)?.size(), 1);
        for size in [0, 4, 12] {
            assert!(matches!(mesh.block(View::DP_SHARD, size), Err(Error::Connect { .. })));
        }
        Ok::<_, BoxError>(())
    });
    ran.unwrap();
}
