//! The place of this process among the ranks.

use ferrotitan_comm::processes::Environment;

/// The place of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// There is no other process: all ranks are here.
    Alone,
    /// One rank of several processes, started by our launcher or by another.
    Rank(Environment),
}

impl Place {
    /// The place that the environment says.
    ///
    /// # Errors
    /// When the environment says half of it, or says it wrongly.
    pub fn read() -> Result<Self, ferrotitan_comm::Error> {
        if Environment::is_set() { Ok(Self::Rank(Environment::read()?)) } else { Ok(Self::Alone) }
    }

    /// The rank of this process, 0 where it is alone.
    pub fn rank(&self) -> usize {
        match self {
            Self::Alone => 0,
            Self::Rank(environment) => environment.rank,
        }
    }
}
