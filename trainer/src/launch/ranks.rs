//! What the ranks of this machine are started with.

use super::output::{Prefix, Sink};
use super::parent::LAUNCHED;
use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The machines of a run, and which of them this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machines {
    /// How many.
    pub count: usize,
    /// Which one this is.
    pub index: usize,
    /// The address of machine 0, for all to meet.
    pub master_addr: String,
    /// The port there; `None`: one that is free, which only a single machine can choose.
    pub master_port: Option<u16>,
}

impl Default for Machines {
    fn default() -> Self {
        Self { count: 1, index: 0, master_addr: Ipv4Addr::LOCALHOST.to_string(), master_port: None }
    }
}

/// What to start.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The program of each rank.
    pub program: PathBuf,
    /// Its arguments, the same for all ranks.
    pub args: Vec<OsString>,
    /// Ranks on this machine.
    pub ranks: usize,
    /// The machines.
    pub machines: Machines,
    /// How long ranks may take to end after they were asked to.
    pub grace: Duration,
    /// What stands before their lines.
    pub prefix: Prefix,
    /// Where the lines of their standard output go.
    pub stdout: Sink,
    /// Where the lines of their standard error go.
    pub stderr: Sink,
}

impl Spec {
    /// The environment of a rank of this machine.
    pub(super) fn environment(&self, local_rank: usize, port: u16) -> Vec<(&'static str, String)> {
        let rank = self.machines.index * self.ranks + local_rank;
        let mut environment = vec![
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", (self.machines.count * self.ranks).to_string()),
            ("LOCAL_WORLD_SIZE", self.ranks.to_string()),
            ("MASTER_ADDR", self.machines.master_addr.clone()),
            ("MASTER_PORT", port.to_string()),
            (LAUNCHED, "1".to_owned()),
        ];
        // Without this, the threads of each rank would be as many as the machine has cores.
        if std::env::var_os("TORCH_CPP_LOG_LEVEL").is_none() {
            // What c10d warns of while ranks look for each other comes again as an error of ours.
            environment.push(("TORCH_CPP_LOG_LEVEL", "ERROR".to_owned()));
        }
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            environment.push(("OMP_NUM_THREADS", (cores / self.ranks.max(1)).max(1).to_string()));
        }
        if self.prefix.color && std::env::var_os("NO_COLOR").is_none() {
            environment.push(("CLICOLOR_FORCE", "1".to_owned()));
        }
        environment
    }

    /// The number of the first rank of this machine.
    pub(super) fn first_rank(&self) -> usize {
        self.machines.index * self.ranks
    }

    pub(super) fn start(&self, local_rank: usize, port: u16) -> io::Result<Child> {
        Command::new(&self.program)
            .args(&self.args)
            .envs(self.environment(local_rank, port))
            // Our end of it tells the rank that we live.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: what the rank starts ends with it, and the terminal's Ctrl-C comes from us alone.
            .process_group(0)
            .spawn()
    }
}

/// A port of this machine that is free now. Another process could take it before rank 0 does; then rank 0 says so.
pub(super) fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
