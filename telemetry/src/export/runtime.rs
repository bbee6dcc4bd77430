//! The thread that waits for the network.

use tokio::runtime::{Builder, Runtime};

use crate::{Error, Result};

/// A runtime of one thread, beside the threads that train.
pub(super) fn runtime() -> Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).thread_name("telemetry").enable_all().build().map_err(Error::Runtime)
}
