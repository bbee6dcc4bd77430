//! Which rank of which world this process is: the variables that torchrun, Slurm scripts and Kubernetes operators set.

use std::env;
use std::str::FromStr;

use crate::{Error, Result};

/// What the environment says of this process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Environment {
    /// `RANK`: this process among all.
    pub rank: usize,
    /// `WORLD_SIZE`: how many there are.
    pub world_size: usize,
    /// `LOCAL_RANK`: this process among those of its machine.
    pub local_rank: usize,
    /// `LOCAL_WORLD_SIZE`: how many its machine runs.
    pub local_world_size: usize,
    /// `MASTER_ADDR`: the name or address of the machine where the store is.
    pub master_addr: String,
    /// `MASTER_PORT`: the store's port.
    pub master_port: u16,
    /// With `TORCHELASTIC_USE_AGENT_STORE`, how often torchrun has restarted the ranks: its agent serves the store, and
    /// keeps the keys of each attempt apart. Absent where rank 0 serves it.
    pub agent_attempt: Option<u64>,
}

impl Environment {
    /// Whether this process was started as a rank: `RANK` or `WORLD_SIZE` is set.
    pub fn is_set() -> bool {
        ["RANK", "WORLD_SIZE"].into_iter().any(|name| env::var_os(name).is_some())
    }

    /// Reads this process's environment.
    ///
    /// # Errors
    /// [`Error::Environment`] with every variable that is missing, malformed, or contradicts another.
    pub fn read() -> Result<Self> {
        Self::from_variables(|name| env::var(name).ok())
    }

    /// Reads variables from anywhere.
    ///
    /// # Errors
    /// See [`Environment::read`].
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut problems = Vec::new();
        let agent = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let mut reader = Reader { variable: &variable, problems: &mut problems };
        let environment = Environment {
            rank: reader.number("RANK", "a rank, such as 0"),
            world_size: reader.number("WORLD_SIZE", "a number of ranks, such as 1"),
            local_rank: reader.number("LOCAL_RANK", "a rank on this machine, such as 0"),
            local_world_size: reader.number("LOCAL_WORLD_SIZE", "a number of ranks on this machine, such as 1"),
            master_addr: reader.text("MASTER_ADDR", "a name or address, such as 127.0.0.1"),
            master_port: reader.number("MASTER_PORT", "a port from 1 to 65535"),
            agent_attempt: agent.then(|| reader.number("TORCHELASTIC_RESTART_COUNT", "how often ranks were restarted")),
        };
        if problems.is_empty() {
            environment.contradictions(&mut problems);
        }
        if problems.is_empty() { Ok(environment) } else { Err(Error::Environment { problems }) }
    }

    fn contradictions(&self, problems: &mut Vec<String>) {
        let pairs = [
            ("RANK", self.rank, "WORLD_SIZE", self.world_size),
            ("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size),
        ];
        for (name, rank, size_name, size) in pairs {
            if rank >= size {
                problems.push(format!("{name} is {rank} but {size_name} is {size}, and ranks count from 0"));
            }
        }
        if self.local_world_size > self.world_size {
            problems.push(format!(
                "LOCAL_WORLD_SIZE is {} but WORLD_SIZE is only {}",
                self.local_world_size, self.world_size
            ));
        }
        if self.master_port == 0 {
            problems.push("MASTER_PORT is 0, not a port from 1 to 65535".to_owned());
        }
    }
}

struct Reader<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
    problems: &'a mut Vec<String>,
}

impl Reader<'_> {
    fn text(&mut self, name: &str, expected: &str) -> String {
        match (self.variable)(name).filter(|value| !value.is_empty()) {
            Some(value) => value,
            None => {
                self.problems.push(format!("{name} is not set (expected {expected})"));
                String::new()
            }
        }
    }

    fn number<T: FromStr + Default>(&mut self, name: &str, expected: &str) -> T {
        let before = self.problems.len();
        let text = self.text(name, expected);
        text.trim().parse().unwrap_or_else(|_| {
            if self.problems.len() == before {
                self.problems.push(format!("{name} is \"{text}\", not {expected}"));
            }
            T::default()
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn read(changes: &[(&str, &str)]) -> Result<Environment> {
        let good = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
        ];
        let find = |list: &[(&str, &str)], name: &str| {
            list.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        Environment::from_variables(|name| find(changes, name).or_else(|| find(&good, name)))
    }

    #[test]
    fn reads_what_torchrun_sets() {
        let environment = read(&[]).unwrap();
        assert_eq!((environment.rank, environment.world_size, environment.master_port), (3, 4, 29500));
        assert_eq!(environment.agent_attempt, None);
        let agent = read(&[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "2")]).unwrap();
        assert_eq!(agent.agent_attempt, Some(2));
    }

    #[test]
    fn names_every_problem_at_once() {
        let Err(Error::Environment { problems }) = Environment::from_variables(|_| None) else { panic!("accepted") };
        assert_eq!(problems.len(), 6);
        let error = read(&[("RANK", "three"), ("MASTER_PORT", "70000"), ("MASTER_ADDR", "")]).unwrap_err().to_string();
        for part in ["RANK is \"three\"", "MASTER_PORT is \"70000\"", "MASTER_ADDR is not set"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn refuses_contradictions() {
        for change in [("RANK", "4"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "5"), ("MASTER_PORT", "0")] {
            assert!(read(&[change]).is_err(), "{change:?}");
        }
    }
}
