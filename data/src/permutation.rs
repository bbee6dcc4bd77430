//! A permutation of `0..n` that is computed index by index: shuffling without a table.

/// Rounds of the Feistel network. Four are enough for it to be a pseudorandom permutation with a pseudorandom round
/// function (Luby and Rackoff, 1988); ours is a hash of 64 bits, and the rest is margin.
const ROUNDS: usize = 6;

/// Half the width in bits of the smallest network. A smaller one has too few keys to reach most permutations.
const MIN_HALF: u32 = 4;

/// A bijection of `0..n`, a different one for each `(seed, stream)`.
///
/// A Feistel network permutes the numbers of an even count of bits, whatever its round function is. It is walked from
/// an index until it lands below `n` (cycle walking: Black and Rogaway, 2002), which takes less than four steps on
/// average, since the network is less than four times as large as `n` (or has 256 numbers).
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    n: u64,
    half: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` of a seed and a stream.
    pub(crate) fn new(n: u64, seed: u64, stream: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        let half = bits.div_ceil(2).max(MIN_HALF);
        let base = mix(mix(seed).wrapping_add(stream));
        let keys = std::array::from_fn(|round| mix(base.wrapping_add(round as u64)));
        Self { n, half, keys }
    }

    /// Where `index`, which must be below `n`, goes.
    pub(crate) fn get(&self, index: u64) -> u64 {
        debug_assert!(index < self.n, "{index} is not below {}", self.n);
        let mut index = index;
        loop {
            index = self.step(index);
            if index < self.n {
                return index;
            }
        }
    }

    fn step(&self, index: u64) -> u64 {
        let mask = (1 << self.half) - 1;
        let (mut left, mut right) = (index >> self.half, index & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right.wrapping_add(key)) & mask));
        }
        (left << self.half) | right
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), after its increment: a bijection that mixes all bits.
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(n: u64, seed: u64, stream: u64) -> Vec<u64> {
        let permutation = Permutation::new(n, seed, stream);
        (0..n).map(|index| permutation.get(index)).collect()
    }

    proptest! {
        #[test]
        fn it_is_a_bijection(n in 1_u64..5000, seed: u64, stream: u64) {
            let mut seen = table(n, seed, stream);
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..n));
        }

        #[test]
        fn seeds_and_streams_differ(n in 30_u64..2000, seed: u64, stream: u64) {
            let base = table(n, seed, stream);
            prop_assert_ne!(&base, &table(n, seed.wrapping_add(1), stream));
            prop_assert_ne!(&base, &table(n, seed, stream.wrapping_add(1)));
            prop_assert_ne!(base, (0..n).collect::<Vec<_>>());
        }

        #[test]
        fn large_domains_stay_inside(n in 1_u64.., seed: u64, index: u64) {
            prop_assert!(Permutation::new(n, seed, 0).get(index % n) < n);
        }
    }

    /// Over many streams, each index goes everywhere equally often: chi-squared with 16 and 255 degrees of freedom, at
    /// odds of far less than one in a thousand.
    #[test]
    fn it_is_uniform() {
        for (n, bound) in [(17_u64, 45.0), (256, 350.0)] {
            for index in [0, 1, n - 1] {
                let draws = 40 * n;
                let mut counts = vec![0_f64; n as usize];
                for stream in 0..draws {
                    counts[Permutation::new(n, 42, stream).get(index) as usize] += 1.0;
                }
                let chi_squared: f64 = counts.iter().map(|count| (count - 40.0).powi(2) / 40.0).sum();
                assert!(chi_squared < bound, "n {n}, index {index}: {chi_squared}");
            }
        }
    }

    /// Neighbours do not stay together: the mean distance of their images is that of random numbers, a third of `n`.
    #[test]
    fn neighbours_are_parted() {
        let table = table(3000, 7, 1);
        let sum: u64 = table.windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum();
        let mean = sum as f64 / 2999.0;
        assert!((mean - 1000.0).abs() < 60.0, "{mean}");
    }
}
