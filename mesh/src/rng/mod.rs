//! A counter-based random generator: value number `i` of a stream is a function of the stream and `i` alone, so any
//! layout of a tensor is filled with parts of one and the same tensor, in any order, on any number of threads.
//!
//! The result is the same on every machine, bit for bit: only additions, multiplications, divisions and square roots
//! are used, which IEEE 754 defines exactly, and none of the platform's mathematical functions.

mod distribution;
mod normal;
mod philox;

pub use distribution::Distribution;
pub use normal::{cdf, quantile};
pub use philox::philox4x32;

use crate::Region;
use distribution::Sampler;

/// An endless sequence of independent values, named by a seed and, for a parameter, its full name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stream {
    key: [u32; 2],
}

impl Stream {
    /// The stream of this seed and name. For one seed, two names share a stream only if their 64-bit hashes agree.
    pub fn new(seed: u64, name: &str) -> Self {
        Stream { key: halves(mix(hash(name) ^ mix(seed))) }
    }

    /// Value number `index`. To draw many, [`Stream::fill`] is faster.
    pub fn sample(&self, distribution: Distribution, index: u64) -> f64 {
        let mut value = [0.0];
        self.fill(distribution, index, &mut value);
        value[0]
    }

    /// Values number `first_index` and following (beyond `u64::MAX`, from 0 again). Parameters that
    /// [`Distribution::validate`] refuses give NaN.
    pub fn fill(&self, distribution: Distribution, first_index: u64, out: &mut [f64]) {
        self.fill_with(&distribution.sampler(), first_index, out);
    }

    /// The values of a region of a tensor of `global_shape`, whose elements are numbered row-major. NaN throughout where
    /// the region is not inside the tensor or `out` is not as long as the region.
    pub fn fill_region(&self, distribution: Distribution, global_shape: &[usize], region: &Region, out: &mut [f64]) {
        let global = Region::whole(global_shape);
        if !global.contains(region) || out.len() != region.numel() {
            return out.fill(f64::NAN);
        }
        let sampler = distribution.sampler();
        let mut rest = out;
        for (start, length) in region.runs_in(&global) {
            let (run, after) = rest.split_at_mut(length);
            self.fill_with(&sampler, start as u64, run);
            rest = after;
        }
    }

    fn fill_with(&self, sampler: &Sampler, first_index: u64, out: &mut [f64]) {
        // One loop per kind of distribution, so that the choice is made outside of it.
        match *sampler {
            Sampler::Constant(value) => out.fill(value),
            Sampler::Uniform { low, width } => self.map(first_index, out, |u| low + width * u),
            Sampler::Normal { mean, std } => self.map(first_index, out, |u| mean + std * quantile(u)),
            Sampler::Truncated(ref truncated) => self.map(first_index, out, |u| truncated.value(u)),
        }
    }

    /// `out[k] = f(u)` with `u` the uniform number `first_index + k`. One block of the generator serves two of them.
    fn map(&self, first_index: u64, out: &mut [f64], f: impl Fn(f64) -> f64) {
        let (head, body) = out.split_at_mut(out.len().min((first_index % 2) as usize));
        let next = |block| (block + 1) & (u64::MAX >> 1);
        let mut block = first_index / 2;
        for value in head {
            *value = f(self.pair(block)[1]);
            block = next(block);
        }
        let mut pairs = body.chunks_exact_mut(2);
        for pair in &mut pairs {
            let [even, odd] = self.pair(block);
            (pair[0], pair[1]) = (f(even), f(odd));
            block = next(block);
        }
        for value in pairs.into_remainder() {
            *value = f(self.pair(block)[0]);
        }
    }

    /// Uniform numbers `2 * block` and `2 * block + 1`, strictly between 0 and 1 and symmetric about a half: the midpoints
    /// of 2^52 intervals, which are exact.
    fn pair(&self, block: u64) -> [f64; 2] {
        let [low, high] = halves(block);
        let [a, b, c, d] = philox4x32([low, high, 0, 0], self.key);
        [(a, b), (c, d)].map(|(low, high)| {
            let bits = u64::from(high) << 32 | u64::from(low);
            ((bits >> 12) as f64 + 0.5) * (1.0 / (1_u64 << 52) as f64)
        })
    }
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// FNV-1a, 64 bits (Fowler, Noll and Vo).
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The finalizer of `SplitMix64` (Steele, Lea and Flood, 2014): one to one, every input bit reaches every output bit.
fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published vectors: FNV-1a's own, and the first output of `SplitMix64` from 0.
    #[test]
    fn hash_and_mix_known_answers() {
        assert_eq!(hash("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash("foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf);
    }

    /// What a seed and a name give must never change: checkpoints and parity with earlier runs depend on it. The
    /// uniform values are from an implementation in Python's integers, the normal ones from arbitrary precision.
    #[test]
    fn pinned_streams() {
        let (uniform, normal) =
            (Distribution::Uniform { low: 0.0, high: 1.0 }, Distribution::Normal { mean: 0.0, std: 1.0 });
        let pinned = [
            (0, "", 0, 0.480_337_032_080_439_54, -0.049_307_723_980_176_77),
            (42, "layers.0.attention.wq.weight", 7, 0.904_189_812_411_274_7, 1.305_800_602_367_909_5),
            (u64::MAX, "tok_embeddings.weight", (1 << 40) + 1, 0.359_036_262_952_114_3, -0.361_036_012_681_667_2),
        ];
        for (seed, name, index, u, z) in pinned {
            let stream = Stream::new(seed, name);
            assert_eq!(stream.sample(uniform, index), u);
            let found = stream.sample(normal, index);
            assert!((found - z).abs() <= 4.0 * f64::EPSILON * z.abs(), "{found} is not {z}");
        }
        let bits = Stream::new(42, "layers.0.attention.wq.weight").sample(normal, 7).to_bits();
        assert_eq!(bits, 0x3ff4_e48f_2c24_46be, "the last bit is part of the promise");
    }

    #[test]
    fn indices_wrap_around() {
        let uniform = Distribution::Uniform { low: 0.0, high: 1.0 };
        let stream = Stream::new(1, "a");
        for first in [u64::MAX - 3, u64::MAX - 2, u64::MAX] {
            let mut out = [0.0; 7];
            stream.fill(uniform, first, &mut out);
            let one_by_one: Vec<_> = (0..7).map(|k| stream.sample(uniform, first.wrapping_add(k))).collect();
            assert_eq!(out[..], one_by_one);
        }
    }
}
