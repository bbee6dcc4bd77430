//! An endpoint that Prometheus scrapes.

use std::net::SocketAddr;
use std::sync::Arc;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};
use tokio::runtime::Runtime;

use super::runtime::runtime;
use crate::{Error, Result};

/// Serves metrics until it is dropped.
pub(crate) struct PrometheusServer {
    recorder: Arc<PrometheusRecorder>,
    runtime: Option<Runtime>,
}

impl PrometheusServer {
    pub(crate) fn start(address: SocketAddr) -> Result<Self> {
        let runtime = runtime()?;
        let built = {
            let _inside = runtime.enter();
            PrometheusBuilder::new().with_http_listener(address).build()
        };
        let (recorder, serve) = built.map_err(|error| Error::Prometheus { address, reason: error.to_string() })?;
        runtime.spawn(serve);
        Ok(Self { recorder: Arc::new(recorder), runtime: Some(runtime) })
    }

    pub(crate) fn recorder(&self) -> Arc<PrometheusRecorder> {
        Arc::clone(&self.recorder)
    }
}

impl Drop for PrometheusServer {
    fn drop(&mut self) {
        // Whoever is being answered at this moment does not hold up the end of the run.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
