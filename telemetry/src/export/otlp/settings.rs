//! Where OTLP goes: by the options, and for what they leave open by the environment, as its specification has it.

use std::env;

use opentelemetry::{Key, KeyValue};
use opentelemetry_sdk::Resource;

use super::SCOPE;
use crate::metrics::{Otlp, OtlpProtocol};
use crate::{Error, Result};

/// Complete addresses, and how to talk to them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) protocol: OtlpProtocol,
    pub(super) metrics: String,
    pub(super) spans: String,
}

impl Settings {
    pub(super) fn read(options: &Otlp) -> Result<Self> {
        Self::resolve(options, |name| env::var(name).ok())
    }

    fn resolve(options: &Otlp, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        // An empty variable counts as one that is not set.
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let protocol = match options.protocol {
            Some(protocol) => protocol,
            None => match variable("OTEL_EXPORTER_OTLP_PROTOCOL").as_deref() {
                Some("grpc") => OtlpProtocol::Grpc,
                Some("http/protobuf") | None => OtlpProtocol::Http,
                Some(other) => {
                    let reason = format!("OTEL_EXPORTER_OTLP_PROTOCOL is {other:?}; it can be grpc or http/protobuf");
                    return Err(Error::Otlp { reason });
                }
            },
        };
        let below = |base: String, path: &str| match protocol {
            // The method's name is its path.
            OtlpProtocol::Grpc => base,
            OtlpProtocol::Http => format!("{}{path}", base.trim_end_matches('/')),
        };
        let address = |signal: &str, path: &str| {
            let address = if let Some(base) = &options.endpoint {
                below(base.clone(), path)
            } else if let Some(address) = variable(&format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")) {
                address
            } else if let Some(base) = variable("OTEL_EXPORTER_OTLP_ENDPOINT") {
                below(base, path)
            } else {
                let port = if protocol == OtlpProtocol::Grpc { 4317 } else { 4318 };
                below(format!("http://localhost:{port}"), path)
            };
            match address.starts_with("http://") {
                true => Ok(address),
                false => Err(Error::Otlp {
                    reason: format!(
                        "the endpoint {address:?} does not begin with http://; for a collector behind TLS, send to one \
                         on this machine that passes it on"
                    ),
                }),
            }
        };
        Ok(Self { protocol, metrics: address("METRICS", "/v1/metrics")?, spans: address("TRACES", "/v1/traces")? })
    }
}

/// Who sends: by the environment (`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`), and what that leaves open. Processes
/// of one run are told apart by their first ranks.
pub(super) fn resource(first_rank: usize) -> Resource {
    let known = Resource::builder().build();
    let text = |name| known.get(&Key::from_static_str(name)).map(|value| value.as_str().into_owned());
    let mut resource = Resource::builder();
    if text("service.name").is_none_or(|name| name.starts_with("unknown_service")) {
        resource = resource.with_service_name(SCOPE);
    }
    if text("service.instance.id").is_none() {
        resource = resource.with_attribute(KeyValue::new("service.instance.id", first_rank.to_string()));
    }
    resource.build()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn resolve(
        endpoint: Option<&str>,
        protocol: Option<OtlpProtocol>,
        environment: &[(&str, &str)],
    ) -> Result<Settings> {
        let options = Otlp { endpoint: endpoint.map(str::to_owned), protocol };
        Settings::resolve(&options, |name| {
            environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[track_caller]
    fn check(resolved: Result<Settings>, protocol: OtlpProtocol, metrics: &str, spans: &str) {
        let expected = Settings { protocol, metrics: metrics.to_owned(), spans: spans.to_owned() };
        assert_eq!(resolved.unwrap(), expected);
    }

    #[test]
    fn options_come_before_the_environment() {
        use OtlpProtocol::{Grpc, Http};
        let local = |path: &str| format!("http://localhost:4318{path}");
        check(resolve(None, None, &[]), Http, &local("/v1/metrics"), &local("/v1/traces"));
        check(resolve(None, Some(Grpc), &[]), Grpc, "http://localhost:4317", "http://localhost:4317");
        let environment =
            [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://far:1/"), ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://m:2/x")];
        check(resolve(None, None, &environment), Http, "http://m:2/x", "http://far:1/v1/traces");
        check(
            resolve(Some("http://here:3"), None, &environment),
            Http,
            "http://here:3/v1/metrics",
            "http://here:3/v1/traces",
        );
        let grpc = [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "")];
        check(resolve(Some("http://here:3"), None, &grpc), Grpc, "http://here:3", "http://here:3");
        check(
            resolve(Some("http://here:3"), Some(Http), &grpc),
            Http,
            "http://here:3/v1/metrics",
            "http://here:3/v1/traces",
        );
        check(resolve(None, None, &grpc), Grpc, "http://localhost:4317", "http://localhost:4317");
    }

    #[test]
    fn what_cannot_work_is_said() {
        let error = resolve(None, None, &[("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")]).unwrap_err().to_string();
        assert!(error.contains("grpc or http/protobuf"), "{error}");
        for endpoint in ["https://there:4318", "there:4318"] {
            let error = resolve(Some(endpoint), None, &[]).unwrap_err().to_string();
            assert!(error.contains("begin with http://"), "{error}");
        }
    }
}
