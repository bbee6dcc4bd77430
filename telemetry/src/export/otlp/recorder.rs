//! From the `metrics` facade to OpenTelemetry's instruments.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use metrics_util::registry::{Registry, Storage};
use opentelemetry::KeyValue;
use opentelemetry::metrics::{self as otel, Meter};

use crate::metrics::table::NON_FINITE;

/// Records into OpenTelemetry, one instrument a name.
pub(crate) struct OtlpRecorder {
    series: Registry<Key, Instruments>,
    descriptions: Arc<Descriptions>,
}

/// Unit and description by name. An instrument has them from its first value on, so they come before.
type Descriptions = Mutex<HashMap<String, (&'static str, SharedString)>>;

impl OtlpRecorder {
    pub(super) fn new(meter: Meter) -> Self {
        let non_finite = meter.u64_counter(NON_FINITE).with_description("Values that OTLP cannot carry").build();
        let descriptions = Arc::<Descriptions>::default();
        let instruments = Instruments { meter, non_finite, descriptions: Arc::clone(&descriptions) };
        Self { series: Registry::new(instruments), descriptions }
    }

    fn describe(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        // As the Unified Code for Units of Measure writes them, which OTLP asks for.
        let unit = match unit {
            Some(Unit::Bytes) => "By",
            Some(unit) => unit.as_canonical_label(),
            None => "1",
        };
        let mut descriptions = self.descriptions.lock().unwrap_or_else(PoisonError::into_inner);
        descriptions.insert(name.as_str().to_owned(), (unit, description));
    }
}

impl Recorder for OtlpRecorder {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(name, unit, description);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(name, unit, description);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(name, unit, description);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.series.get_or_create_counter(key, Arc::clone))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.series.get_or_create_gauge(key, Arc::clone))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.series.get_or_create_histogram(key, Arc::clone))
    }
}

/// Makes the instruments.
struct Instruments {
    meter: Meter,
    non_finite: otel::Counter<u64>,
    descriptions: Arc<Descriptions>,
}

impl Instruments {
    fn description(&self, key: &Key) -> (&'static str, SharedString) {
        let descriptions = self.descriptions.lock().unwrap_or_else(PoisonError::into_inner);
        descriptions.get(key.name()).cloned().unwrap_or_default()
    }

    fn finite(&self, key: &Key) -> Finite {
        let mut labels = labels(key);
        labels.push(KeyValue::new("metric", key.name().to_owned()));
        Finite { counter: self.non_finite.clone(), labels }
    }
}

impl Storage<Key> for Instruments {
    type Counter = Arc<OtlpCounter>;
    type Gauge = Arc<OtlpGauge>;
    type Histogram = Arc<OtlpHistogram>;

    fn counter(&self, key: &Key) -> Self::Counter {
        let (unit, description) = self.description(key);
        let builder = self.meter.u64_counter(key.name().to_owned()).with_unit(unit).with_description(description);
        Arc::new(OtlpCounter { instrument: builder.build(), labels: labels(key), total: AtomicU64::new(0) })
    }

    fn gauge(&self, key: &Key) -> Self::Gauge {
        let (unit, description) = self.description(key);
        let builder = self.meter.f64_gauge(key.name().to_owned()).with_unit(unit).with_description(description);
        let (instrument, finite) = (builder.build(), self.finite(key));
        Arc::new(OtlpGauge { instrument, labels: labels(key), finite, value: Mutex::new(0.0) })
    }

    fn histogram(&self, key: &Key) -> Self::Histogram {
        let (unit, description) = self.description(key);
        let builder = self.meter.f64_histogram(key.name().to_owned()).with_unit(unit).with_description(description);
        Arc::new(OtlpHistogram { instrument: builder.build(), labels: labels(key), finite: self.finite(key) })
    }
}

fn labels(key: &Key) -> Vec<KeyValue> {
    key.labels().map(|label| KeyValue::new(label.key().to_owned(), label.value().to_owned())).collect()
}

/// Lets finite values through and counts the others, which OpenTelemetry would drop without a word.
struct Finite {
    counter: otel::Counter<u64>,
    labels: Vec<KeyValue>,
}

impl Finite {
    fn check(&self, value: f64) -> bool {
        if !value.is_finite() {
            self.counter.add(1, &self.labels);
        }
        value.is_finite()
    }
}

struct OtlpCounter {
    instrument: otel::Counter<u64>,
    labels: Vec<KeyValue>,
    total: AtomicU64,
}

impl CounterFn for OtlpCounter {
    fn increment(&self, value: u64) {
        self.total.fetch_add(value, Ordering::Relaxed);
        self.instrument.add(value, &self.labels);
    }

    fn absolute(&self, value: u64) {
        // OpenTelemetry's counters only know how to be added to.
        let before = self.total.fetch_max(value, Ordering::Relaxed);
        self.instrument.add(value.saturating_sub(before), &self.labels);
    }
}

struct OtlpGauge {
    instrument: otel::Gauge<f64>,
    labels: Vec<KeyValue>,
    finite: Finite,
    value: Mutex<f64>,
}

impl OtlpGauge {
    fn update(&self, update: impl FnOnce(f64) -> f64) {
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        *value = update(*value);
        if self.finite.check(*value) {
            self.instrument.record(*value, &self.labels);
        }
    }
}

impl GaugeFn for OtlpGauge {
    fn increment(&self, value: f64) {
        self.update(|before| before + value);
    }

    fn decrement(&self, value: f64) {
        self.update(|before| before - value);
    }

    fn set(&self, value: f64) {
        self.update(|_| value);
    }
}

struct OtlpHistogram {
    instrument: otel::Histogram<f64>,
    labels: Vec<KeyValue>,
    finite: Finite,
}

impl HistogramFn for OtlpHistogram {
    fn record(&self, value: f64) {
        if self.finite.check(value) {
            self.instrument.record(value, &self.labels);
        }
    }
}
