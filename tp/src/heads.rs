//! How attention heads are dealt to ranks, none ever split.

use ferrotitan_mesh::Parts;

use crate::shares::share;

/// The heads of an attention layer, by which its projections are split.
///
/// Query heads follow the key-value head that serves them. Where there are fewer key-value heads than ranks, each is
/// held by several ranks, which share its query heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Key-value heads; without grouped queries, all heads.
    pub key_value: usize,
    /// Features of a head.
    pub size: usize,
}

impl Heads {
    /// How an axis of `length` features, of query or of key-value heads, is dealt to `ranks`. The message of an error
    /// says what does not fit.
    pub(crate) fn parts(&self, length: usize, ranks: usize) -> Result<Parts, String> {
        let Heads { key_value, size } = *self;
        if key_value == 0 || size == 0 || !length.is_multiple_of(size) || !(length / size).is_multiple_of(key_value) {
            return Err(format!(
                "{length} features are no multiple of {key_value} key-value heads of {size}: correct the plan's heads"
            ));
        }
        let heads = length / size;
        if key_value >= ranks || heads == key_value {
            return Parts::groups(key_value, length / key_value, ranks).map_err(|error| error.to_string());
        }
        let (sharing, served) = (ranks / key_value, heads / key_value);
        if !ranks.is_multiple_of(key_value) {
            return Err(format!(
                "{key_value} key-value heads cannot be dealt to {ranks} ranks: use at most {key_value} ranks, or a \
                 multiple of {key_value}"
            ));
        }
        if served < sharing {
            return Err(format!("{heads} heads cannot be dealt to {ranks} ranks: use at most {heads} ranks"));
        }
        let range = |rank: usize| {
            let first = rank / sharing * served;
            let own = share(served, rank % sharing, sharing);
            (first + own.start) * size..(first + own.end) * size
        };
        Ok(Parts::At((0..ranks).map(range).collect()))
    }

    /// Whether ranks share key-value heads: then how many share each.
    pub(crate) fn copies(parts: &Parts) -> usize {
        match parts {
            Parts::At(ranges) => ranges.iter().filter(|range| ranges.first() == Some(*range)).count().max(1),
            Parts::Even => 1,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges(parts: &Parts) -> Vec<std::ops::Range<usize>> {
        match parts {
            Parts::At(ranges) => ranges.clone(),
            Parts::Even => Vec::new(),
        }
    }

    proptest! {
        /// Each rank holds exactly the key-value heads of its query heads, and each query head lies on one rank.
        #[test]
        fn query_heads_lie_with_their_key_value_head(key_value in 1_usize..9, served in 1_usize..7, size in 1_usize..5, ranks in 1_usize..13) {
            let heads = Heads { key_value, size };
            let (q, kv) = (heads.parts(key_value * served * size, ranks), heads.parts(key_value * size, ranks));
            let fits = key_value >= ranks || (ranks.is_multiple_of(key_value) && served * key_value >= ranks);
            if served > 1 {
                prop_assert_eq!(q.is_ok(), fits);
            }
            if !fits { return Ok(()); }
            let (q, kv) = (ranges(&q.unwrap()), ranges(&kv.unwrap()));
            let mut next = 0;
            for (q, kv) in q.iter().zip(&kv) {
                prop_assert_eq!(q.start, next, "query heads are dealt once, in order");
                next = q.end;
                prop_assert!(!q.is_empty());
                let (first, last) = (q.start / size / served, (q.end / size - 1) / served);
                prop_assert_eq!((first * size)..(last + 1) * size, kv.clone());
                prop_assert!(q.len().is_multiple_of(kv.len()), "grouped attention needs a whole ratio");
            }
            prop_assert_eq!(next, key_value * served * size);
        }
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let refusal = |key_value, length, ranks| Heads { key_value, size: 4 }.parts(length, ranks).unwrap_err();
        assert!(refusal(2, 4 * 8, 3).contains("2 key-value heads cannot be dealt to 3 ranks"));
        assert!(refusal(2, 4 * 4, 8).contains("4 heads cannot be dealt to 8 ranks: use at most 4"));
        assert!(refusal(3, 4 * 8, 2).contains("correct the plan's heads"));
        assert!(refusal(0, 4 * 8, 2).contains("correct the plan's heads"));
    }
}
