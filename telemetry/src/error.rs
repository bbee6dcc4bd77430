//! What can go wrong.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why something of this crate failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A build without this exporter.
    #[error("{exporter} is not in this build; build with the Cargo feature `{feature}` to have it")]
    NotBuilt {
        /// Which exporter.
        exporter: &'static str,
        /// Whose feature is off.
        feature: &'static str,
    },
    /// An address that cannot be served.
    #[error(
        "cannot serve metrics to Prometheus at {address}: {reason}; choose an address of this machine that is free"
    )]
    Prometheus {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        reason: String,
    },
    /// Settings that OTLP cannot work with.
    #[error("cannot send OTLP: {reason}")]
    Otlp {
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// The end of a run came before everything was sent.
    #[error("not all metrics and spans could be sent over OTLP: {reason}")]
    Unsent {
        /// Why.
        reason: String,
    },
    /// An event file that cannot be written.
    #[error("cannot write TensorBoard's event file {}", path.display())]
    TensorBoard {
        /// The file, or the folder where it cannot be begun.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No thread for the network.
    #[error("cannot start the thread that serves and sends metrics")]
    Runtime(#[source] io::Error),
    /// A live view without a terminal.
    #[error("there is no live view, since standard output is not a terminal")]
    NoTerminal,
    /// A terminal that cannot be drawn on.
    #[error("cannot draw the live view on the terminal")]
    Terminal(#[source] io::Error),
    /// A trace, or the records of a run, that cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A trace, record or report that cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file that is not what it should be.
    #[error("{} is no trace that this program wrote: {reason}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A folder without a usable record of any rank.
    #[error(
        "{} holds no record of a rank; give the folder comm_traces of a run that ended badly{broken}",
        folder.display()
    )]
    NoDumps {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with the files in it.
        broken: String,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
