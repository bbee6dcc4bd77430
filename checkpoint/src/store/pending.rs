//! Requests that are on their way.

use std::io;
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use crate::{Error, Result};

/// Drives the requests of all stores of this process. Whoever waits for one waits on a thread of its own, so that these
/// few threads suffice. Work of local folders goes to the blocking threads.
static RUNTIME: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2).max_blocking_threads(64).thread_name("object store").enable_all().build()
});

/// An answer that will come, or an error once the time is up. Dropping it lets the request go on.
#[derive(Debug)]
#[must_use]
pub(crate) struct Pending<T> {
    answer: Receiver<Option<object_store::Result<T>>>,
    action: &'static str,
    object: String,
    timeout: Duration,
}

impl<T: Send + 'static> Pending<T> {
    pub(crate) fn start(
        action: &'static str,
        object: String,
        timeout: Duration,
        work: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<Self> {
        let runtime =
            RUNTIME.as_ref().map_err(|error| Error::Thread { thread: "object store", reason: error.to_string() })?;
        let (tell, answer) = sync_channel(1);
        runtime.spawn(async move {
            // Nobody listens when the waiting side has met another error.
            let _ = tell.send(tokio::time::timeout(timeout, work).await.ok());
        });
        Ok(Pending { answer, action, object, timeout })
    }

    pub(crate) fn wait(self) -> Result<T> {
        let Pending { answer, action, object, timeout } = self;
        match answer.recv() {
            Ok(Some(answer)) => answer.map_err(|error| explain(action, object, error)),
            Ok(None) => Err(Error::TimedOut { action, object, after: timeout }),
            Err(_) => {
                Err(Error::Thread { thread: "object store", reason: format!("it panicked in {action} {object}") })
            }
        }
    }
}

fn explain(action: &'static str, object: String, error: object_store::Error) -> Error {
    let reason = error.to_string();
    // Refused lists come as errors of no kind of their own.
    let refused = ["403 Forbidden", "401 Unauthorized"].iter().any(|status| reason.contains(status));
    match error {
        object_store::Error::NotFound { .. } => Error::NotFound { object },
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            Error::Denied { action, object, reason }
        }
        object_store::Error::Generic { .. } if refused => Error::Denied { action, object, reason },
        _ => Error::Store { action, object, reason },
    }
}
