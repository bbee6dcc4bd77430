//! Ring attention on tensors of one's own: four ranks share a sequence of 1000 tokens in two documents.
#![allow(clippy::print_stdout)]

use ferrotitan_comm::threads::{Options, run};
use ferrotitan_cp::{Balance, Mask, Method, Result, attention};
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::Documents;
use tch::{Device, Kind, Tensor};

const SEQ: usize = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mask = Mask::causal().within(Documents::from_lengths(vec![vec![700, 300]])?);
    // Who holds which tokens: the same on every rank.
    let sharding = Balance::Documents.sharding(&mask, 1, SEQ, 4)?;

    let ranks = run(Degrees { cp: 4, ..Degrees::default() }, &Options::default(), |mesh| -> Result<String> {
        let group = mesh.group(View::CP)?;
        // [batch, tokens, heads, features] of the tokens that this rank holds; 8 query heads share 2 key-value heads.
        let tokens = sharding.lengths()[group.rank()] as i64;
        let random = |heads| Tensor::randn([1, tokens, heads, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let (q, k, v) = (random(8), random(2), random(2));

        let out = attention(&q, &k, &v, &mask, &sharding, Method::Ring, &group)?;
        out.square().sum(Kind::Float).backward();

        // The whole output in the order of the sequence, on every rank.
        let whole = sharding.gather(&out.detach(), 1, &group)?;
        assert_eq!(whole.size(), [1, SEQ as i64, 8, 64]);
        let held = sharding.ranges(group.rank());
        Ok(format!("tokens {held:?}, gradient of the keys {:.4}", k.grad().norm().double_value(&[])))
    })?;
    for (rank, line) in ranks.iter().enumerate() {
        println!("rank {rank}: {line}");
    }
    Ok(())
}
