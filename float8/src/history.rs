//! The largest magnitudes of the last steps.

use std::collections::VecDeque;

/// Of one operand. What it says changes only between steps, so that a cast that is computed again is the same.
#[derive(Debug, Default)]
pub(crate) struct History {
    steps: VecDeque<f32>,
    capacity: usize,
}

impl History {
    /// Remembers so many steps; none at all with a capacity of 0.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { steps: VecDeque::new(), capacity }
    }

    pub(crate) fn push(&mut self, largest: f32) {
        self.steps.push_back(largest);
        while self.steps.len() > self.capacity {
            self.steps.pop_front();
        }
    }

    /// The largest magnitude that is remembered.
    pub(crate) fn largest(&self) -> Option<f32> {
        self.steps.iter().copied().reduce(f32::max)
    }

    /// Oldest first.
    pub(crate) fn steps(&self) -> Vec<f32> {
        self.steps.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_the_oldest() {
        let mut history = History::new(2);
        assert_eq!(history.largest(), None);
        for (largest, expected) in [(4.0, 4.0), (1.0, 4.0), (2.0, 2.0)] {
            history.push(largest);
            assert_eq!(history.largest(), Some(expected));
        }
        assert_eq!(history.steps(), [1.0, 2.0]);
        let mut none = History::new(0);
        none.push(3.0);
        assert_eq!(none.largest(), None);
    }
}
