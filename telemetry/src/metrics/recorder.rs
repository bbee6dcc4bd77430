//! The recorder of one rank's threads: the exporters', with a label that says which rank it was.

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Metadata, Recorder, SharedString, Unit};
use metrics_util::layers::Fanout;

/// All exporters at once, for one rank.
#[derive(Clone)]
pub(crate) struct RankRecorder {
    exporters: &'static Fanout,
    rank: usize,
    label: Label,
}

impl RankRecorder {
    pub(crate) fn new(exporters: &'static Fanout, rank: usize) -> Self {
        Self { exporters, rank, label: Label::new("rank", rank.to_string()) }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    fn labelled(&self, key: &Key) -> Key {
        key.with_extra_labels(vec![self.label.clone()])
    }
}

impl Recorder for RankRecorder {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.exporters.describe_counter(name, unit, description);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.exporters.describe_gauge(name, unit, description);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.exporters.describe_histogram(name, unit, description);
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        self.exporters.register_counter(&self.labelled(key), metadata)
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        self.exporters.register_gauge(&self.labelled(key), metadata)
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        self.exporters.register_histogram(&self.labelled(key), metadata)
    }
}
