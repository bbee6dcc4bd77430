//! What a run exports while it runs.

use crate::config::sections::OtlpProtocol;
use crate::config::{Config, Problem};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// What a run exports while it runs, beside the console and `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TelemetryPlan {
    /// The metrics of every rank, not of the first alone.
    pub all_ranks: bool,
    /// Where Prometheus scrapes them.
    pub prometheus: Option<SocketAddr>,
    /// Where OTLP sends metrics and spans.
    pub otlp: Option<OtlpPlan>,
    /// Folder of TensorBoard's event files.
    pub tensorboard: Option<PathBuf>,
    /// Which steps are traced.
    pub traces: Option<TracePlan>,
}

/// Where OTLP goes; what is `None` comes from the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtlpPlan {
    /// The collector's address.
    pub endpoint: Option<String>,
    /// How to talk to it.
    pub protocol: Option<OtlpProtocol>,
}

/// Which steps are traced: the last `steps` of every `every`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePlan {
    /// Folder of the traces.
    pub folder: PathBuf,
    /// Steps from one trace to the next.
    pub every: u64,
    /// Steps of a trace.
    pub steps: u64,
}

impl TelemetryPlan {
    /// What the config asks for.
    ///
    /// # Errors
    /// With everything that is wrong with it.
    pub(crate) fn of(config: &Config) -> Result<Self, Vec<Problem>> {
        let (metrics, profiling) = (&config.metrics, &config.profiling);
        let folder = |name: &str| Path::new(&config.job.dump_folder).join(name);
        let mut problems = Vec::new();
        let address = metrics.prometheus_address.parse::<SocketAddr>();
        if let Err(error) = &address
            && metrics.enable_prometheus
        {
            let key = "metrics.prometheus_address";
            let message = format!("`{key}` is \"{}\": {error}", metrics.prometheus_address);
            problems.push(Problem::new(&[key], message).help("an IP address and a port, as in \"127.0.0.1:9464\""));
        }
        let every = profiling.profile_freq;
        if profiling.enable_profiling && !(1..=every).contains(&profiling.profiler_active) {
            let active = profiling.profiler_active;
            let message = format!("a trace of {active} steps cannot be taken every {every} steps");
            let keys = ["profiling.profiler_active", "profiling.profile_freq"];
            problems
                .push(Problem::new(&keys, message).help("`profiler_active` is at least 1, and at most `profile_freq`"));
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let otlp = || OtlpPlan { endpoint: metrics.otlp_endpoint.clone(), protocol: metrics.otlp_protocol };
        let traces = || TracePlan {
            folder: folder(&profiling.save_traces_folder),
            every: profiling.profile_freq,
            steps: profiling.profiler_active,
        };
        Ok(Self {
            all_ranks: metrics.save_for_all_ranks,
            prometheus: address.ok().filter(|_| metrics.enable_prometheus),
            otlp: metrics.enable_otlp.then(otlp),
            tensorboard: metrics.enable_tensorboard.then(|| folder(&metrics.save_tb_folder)),
            traces: profiling.enable_profiling.then(traces),
        })
    }

    /// Whether metrics go anywhere.
    pub(crate) fn exports(&self) -> bool {
        self.prometheus.is_some() || self.otlp.is_some() || self.tensorboard.is_some()
    }
}
