//! One clock for all ranks.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A clock that gives nanoseconds since it was started, or since another rank's was. Copies give the same times.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    zero: Instant,
    /// What the other clock says when this one says 0.
    offset: i64,
}

impl Clock {
    /// One that begins now.
    pub fn start() -> Self {
        Clock { zero: Instant::now(), offset: 0 }
    }

    /// One that gives nanoseconds since 1970, as far as this machine knows.
    pub fn unix() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock { zero: Instant::now(), offset: i64::try_from(since.as_nanos()).unwrap_or(i64::MAX) }
    }

    /// The same, ahead by what [`offset`] found: it gives the times of the other rank's clock.
    #[must_use]
    pub fn ahead(self, offset: i64) -> Self {
        Clock { offset: self.offset.saturating_add(offset), ..self }
    }

    /// What it says now.
    pub fn now(&self) -> i64 {
        self.at(Instant::now())
    }

    /// What it said, or will say, at that moment.
    pub fn at(&self, moment: Instant) -> i64 {
        let nanoseconds = |duration: std::time::Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
        let since = match moment.checked_duration_since(self.zero) {
            Some(since) => nanoseconds(since),
            None => -nanoseconds(self.zero.duration_since(moment)),
        };
        self.offset.saturating_add(since)
    }
}

/// How far another clock is ahead of this one: `ask` fetches what the other says, `now` reads this one. Of all rounds the
/// shortest tells the most, and the other clock is taken to have been read in its middle; so the result is wrong by half
/// of the shortest round trip at most.
///
/// # Errors
/// The first of `ask`.
pub fn offset<E>(rounds: usize, now: impl Fn() -> i64, mut ask: impl FnMut() -> Result<i64, E>) -> Result<i64, E> {
    let mut best: Option<(i64, i64)> = None;
    for _ in 0..rounds.max(1) {
        let begin = now();
        let theirs = ask()?;
        let took = now().saturating_sub(begin);
        if best.is_none_or(|(shortest, _)| took < shortest) {
            best = Some((took, theirs.saturating_sub(begin.saturating_add(took / 2))));
        }
    }
    Ok(best.map_or(0, |(_, offset)| offset))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::cell::Cell;
    use std::convert::Infallible;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_clock_reads_moments_before_it_began() {
        let clock = Clock::start();
        assert_eq!(clock.at(clock.zero + Duration::from_nanos(70)), 70);
        assert_eq!(clock.ahead(5).at(clock.zero - Duration::from_nanos(30)), -25);
        assert!(Clock::unix().now() > 1_600_000_000_000_000_000);
    }

    proptest! {
        #[test]
        fn the_offset_is_wrong_by_half_of_the_shortest_round_trip_at_most(
            trips in prop::collection::vec((0_i64..1000, 0_i64..1000), 1..20),
            ahead in -1_000_000_i64..1_000_000,
        ) {
            let (time, round) = (Cell::new(0_i64), Cell::new(0));
            let found = offset(trips.len(), || time.get(), || {
                let (there, back) = trips[round.replace(round.get() + 1)];
                let theirs = time.get() + there + ahead;
                time.set(time.get() + there + back);
                Ok::<_, Infallible>(theirs)
            });
            let shortest = trips.iter().map(|(there, back)| there + back).min().unwrap();
            prop_assert!((found.unwrap() - ahead).abs() <= shortest / 2 + 1);
        }
    }
}
