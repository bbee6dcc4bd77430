//! OTLP, by gRPC and by HTTP, to a receiver built on the protocol's own definitions.

#![cfg(feature = "otlp")]
#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ferrotitan_telemetry::Error;
use ferrotitan_telemetry::metrics::table::{COMM_BYTES, GRAD_NORM, LOSS, NON_FINITE, STEP_TIME, TOKENS_SEEN};
use ferrotitan_telemetry::metrics::{Options, Otlp, OtlpProtocol, Telemetry};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use tracing_subscriber::layer::SubscriberExt as _;

/// What a collector has been sent.
#[derive(Clone, Default)]
struct Received {
    metrics: Arc<Mutex<Vec<ExportMetricsServiceRequest>>>,
    spans: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

#[tonic::async_trait]
impl MetricsService for Received {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.metrics.lock().unwrap().push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.spans.lock().unwrap().push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

impl Received {
    /// Serves gRPC on a thread of its own, which ends with the process.
    fn serve_grpc(&self) -> SocketAddr {
        let (sender, receiver) = std::sync::mpsc::channel();
        let received = self.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async move {
                let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
                sender.send(incoming.local_addr().unwrap()).unwrap();
                let server = tonic::transport::Server::builder()
                    .add_service(MetricsServiceServer::new(received.clone()))
                    .add_service(TraceServiceServer::new(received));
                server.serve_with_incoming(incoming).await.unwrap();
            });
        });
        receiver.recv().unwrap()
    }

    /// Serves HTTP on a thread of its own, which ends with the process.
    fn serve_http(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let received = self.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let received = received.clone();
                thread::spawn(move || received.answer(stream.unwrap()));
            }
        });
        address
    }

    /// Answers the requests of one connection.
    fn answer(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        loop {
            let mut head = Vec::new();
            loop {
                let mut line = String::new();
                match reader.read_line(&mut line) {
                    Ok(0) | Err(_) => return,
                    Ok(_) if line == "\r\n" => break,
                    Ok(_) => head.push(line.trim_end().to_ascii_lowercase()),
                }
            }
            let header = |name: &str| head.iter().find_map(|line| line.strip_prefix(name)).unwrap();
            assert_eq!(header("content-type: "), "application/x-protobuf");
            let mut body = vec![0; header("content-length: ").parse().unwrap()];
            reader.read_exact(&mut body).unwrap();
            match head[0].as_str() {
                "post /v1/metrics http/1.1" => {
                    self.metrics.lock().unwrap().push(Message::decode(&body[..]).unwrap());
                }
                "post /v1/traces http/1.1" => {
                    self.spans.lock().unwrap().push(Message::decode(&body[..]).unwrap());
                }
                other => panic!("{other}"),
            }
            write!(&stream, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        }
    }

    /// The last value of a metric with these labels, and its unit.
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<(f64, String)> {
        let requests = self.metrics.lock().unwrap();
        let scopes = requests.iter().flat_map(|request| &request.resource_metrics).flat_map(|of| &of.scope_metrics);
        let mut last = None;
        for metric in scopes.flat_map(|scope| &scope.metrics).filter(|metric| metric.name == name) {
            let points = match metric.data.as_ref().unwrap() {
                Data::Gauge(gauge) => &gauge.data_points,
                Data::Sum(sum) => {
                    assert!(sum.is_monotonic);
                    &sum.data_points
                }
                other => panic!("{other:?}"),
            };
            for point in points.iter().filter(|point| texts(&point.attributes) == sorted(labels)) {
                let value = match point.value.unwrap() {
                    Number::AsDouble(value) => value,
                    Number::AsInt(value) => value as f64,
                };
                last = Some((value, metric.unit.clone()));
            }
        }
        last
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.spans.lock().unwrap();
        let scopes = requests.iter().flat_map(|request| &request.resource_spans).flat_map(|of| &of.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }
}

fn sorted(labels: &[(&str, &str)]) -> Vec<(String, String)> {
    let mut labels: Vec<_> = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    labels.sort();
    labels
}

fn texts(attributes: &[KeyValue]) -> Vec<(String, String)> {
    let mut texts: Vec<_> = attributes.iter().map(|of| (of.key.clone(), text(of.value.as_ref()))).collect();
    texts.sort();
    texts
}

fn text(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.clone()) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}

fn start(address: SocketAddr, protocol: OtlpProtocol) -> Telemetry {
    let otlp = Otlp { endpoint: Some(format!("http://{address}")), protocol: Some(protocol) };
    Telemetry::start(Options { otlp: Some(otlp), ..Options::default() }, 0..2).unwrap()
}

fn exports_a_run(protocol: OtlpProtocol) {
    let received = Received::default();
    let address = match protocol {
        OtlpProtocol::Grpc => received.serve_grpc(),
        OtlpProtocol::Http => received.serve_http(),
    };
    let telemetry = start(address, protocol);
    let rank = telemetry.rank(0).unwrap();
    let subscriber = tracing_subscriber::registry().with(telemetry.span_layer());
    let run = || {
        for step in 1..=3_u64 {
            let _step = tracing::info_span!(target: "ferrotitan_trainer", "step", step).entered();
            tracing::debug_span!(target: "ferrotitan_comm", "all-reduce").in_scope(|| {});
            tracing::info_span!(target: "hyper", "not ours").in_scope(|| {});
            let norm = if step == 2 { f64::NAN } else { step as f64 };
            let samples = [
                LOSS.is(1.0 / step as f64),
                GRAD_NORM.is(norm),
                STEP_TIME.is(f64::INFINITY),
                TOKENS_SEEN.is(1000.0 * step as f64),
                COMM_BYTES.on("tp", 1e9),
            ];
            rank.step(step, &samples).unwrap();
        }
    };
    tracing::subscriber::with_default(subscriber, || {
        rank.run(run);
        let silent = || tracing::info_span!(target: "ferrotitan_trainer", "of rank 1").in_scope(|| {});
        telemetry.rank(1).unwrap().run(silent);
    });
    rank.run(|| {
        metrics::counter!("ferrotitan_retries_total", "store" => "s3").increment(3);
        metrics::gauge!("ferrotitan_queue").set(5.0);
        metrics::gauge!("ferrotitan_queue").decrement(2.0);
    });
    telemetry.finish(Duration::from_secs(20)).unwrap();

    let value = |name, labels: &[_]| received.value(name, labels);
    assert_eq!(value(LOSS.name, &[("rank", "0")]), Some((1.0 / 3.0, "1".to_owned())));
    assert_eq!(value(GRAD_NORM.name, &[("rank", "0")]), Some((3.0, "1".to_owned())));
    assert_eq!(value(TOKENS_SEEN.name, &[("rank", "0")]), Some((3000.0, "1".to_owned())));
    assert_eq!(value(COMM_BYTES.name, &[("rank", "0"), ("dimension", "tp")]), Some((1e9, "By".to_owned())));
    assert_eq!(value("ferrotitan_retries_total", &[("rank", "0"), ("store", "s3")]), Some((3.0, String::new())));
    assert_eq!(value("ferrotitan_queue", &[("rank", "0")]), Some((3.0, String::new())));
    // What OTLP cannot carry is counted.
    assert_eq!(value(STEP_TIME.name, &[("rank", "0")]), None);
    let lost = |name| value(NON_FINITE, &[("metric", name), ("rank", "0")]).unwrap().0;
    assert_eq!((lost(GRAD_NORM.name), lost(STEP_TIME.name)), (1.0, 3.0));

    let spans = received.spans();
    let named = |name: &str| spans.iter().filter(|span| span.name == name).cloned().collect::<Vec<_>>();
    let (steps, collectives) = (named("step"), named("all-reduce"));
    assert_eq!((steps.len(), collectives.len(), spans.len()), (3, 3, 6));
    for (number, (step, collective)) in steps.iter().zip(&collectives).enumerate() {
        assert_eq!(collective.parent_span_id, step.span_id);
        let (step_number, rank) = (("step".to_owned(), (number + 1).to_string()), ("rank".to_owned(), "0".to_owned()));
        assert!(texts(&step.attributes).contains(&step_number), "{step:?}");
        assert!(texts(&step.attributes).contains(&rank) && texts(&collective.attributes).contains(&rank), "{step:?}");
        assert!(step.start_time_unix_nano <= collective.start_time_unix_nano);
        assert!(collective.end_time_unix_nano <= step.end_time_unix_nano);
    }
    let request = received.spans.lock().unwrap()[0].clone();
    let resource = request.resource_spans[0].resource.clone().unwrap();
    assert!(
        texts(&resource.attributes).contains(&("service.name".to_owned(), "ferrotitan".to_owned())),
        "{resource:?}"
    );
}

#[test]
fn a_run_arrives_by_grpc() {
    exports_a_run(OtlpProtocol::Grpc);
}

#[test]
fn a_run_arrives_by_http() {
    exports_a_run(OtlpProtocol::Http);
}

/// Runs against an address where nothing good happens.
fn runs_all_the_same(address: SocketAddr, protocol: OtlpProtocol) {
    let telemetry = start(address, protocol);
    let rank = telemetry.rank(0).unwrap();
    let subscriber = tracing_subscriber::registry().with(telemetry.span_layer());
    let began = Instant::now();
    tracing::subscriber::with_default(subscriber, || {
        // More spans than the queue holds.
        for step in 1..=10_000_u64 {
            let _step = tracing::info_span!(target: "ferrotitan_trainer", "step", step).entered();
            rank.step(step, &[LOSS.is(1.0)]).unwrap();
        }
    });
    let stepped = began.elapsed();
    let error = telemetry.finish(Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, Error::Unsent { .. }), "{error}");
    let ended = began.elapsed() - stepped;
    assert!(stepped < Duration::from_secs(8), "steps waited for the collector: {stepped:?}");
    assert!(ended < Duration::from_secs(4), "the end waited for the collector: {ended:?}");
}

#[test]
fn nobody_needs_to_be_there() {
    // Nobody listens there any more.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::Http] {
        runs_all_the_same(address, protocol);
    }
}

#[test]
fn a_collector_that_never_answers_holds_nothing_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let held: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
    thread::spawn(move || {
        for stream in listener.incoming() {
            held.lock().unwrap().extend(stream);
        }
    });
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::Http] {
        runs_all_the_same(address, protocol);
    }
}

#[test]
fn an_address_that_cannot_be_right_is_said_at_the_start() {
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::Http] {
        for endpoint in ["https://collector:4317", "collector:4317", "http://no host:1"] {
            let otlp = Otlp { endpoint: Some(endpoint.to_owned()), protocol: Some(protocol) };
            let error = Telemetry::start(Options { otlp: Some(otlp), ..Options::default() }, 0..1).unwrap_err();
            assert!(matches!(error, Error::Otlp { .. }) && error.to_string().contains(endpoint), "{error}");
        }
    }
}
