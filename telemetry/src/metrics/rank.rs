//! What one rank records.

use std::sync::{Arc, Mutex, PoisonError};

use metrics::{Key, Label, Level, Metadata, NoopRecorder, Recorder as _};

use super::recorder::RankRecorder;
use super::table::{Kind, Sample};
use super::thread::{Entered, Runs};
use crate::Result;
use crate::export::EventFile;
use crate::tui::View;

const METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// The metrics of one rank. Clones share them.
#[derive(Clone)]
pub struct RankMetrics(Option<Arc<Outputs>>);

/// Where an exported rank's metrics go.
struct Outputs {
    recorder: RankRecorder,
    events: Option<Mutex<EventFile>>,
    view: Option<View>,
}

impl std::fmt::Debug for RankMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RankMetrics").field("exported", &self.0.is_some()).finish()
    }
}

impl RankMetrics {
    /// Of a rank that is not exported.
    pub(super) fn silent() -> Self {
        Self(None)
    }

    pub(super) fn new(recorder: RankRecorder, events: Option<EventFile>, view: Option<View>) -> Self {
        Self(Some(Arc::new(Outputs { recorder, events: events.map(Mutex::new), view })))
    }

    /// Runs `body` as this rank: what it records on this thread through the `metrics` facade, and the spans that it opens,
    /// go to the exporters with the label `rank`, or nowhere if this rank is not exported. A thread that `body` starts can be given a clone to do the
    /// same; otherwise what it records is the process's, without a rank.
    pub fn run<T>(&self, body: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some(outputs) => {
                let _entered = Entered::new(Runs::Exported(outputs.recorder.rank()));
                metrics::with_local_recorder(&outputs.recorder, body)
            }
            None => {
                let _entered = Entered::new(Runs::Silent);
                metrics::with_local_recorder(&NoopRecorder, body)
            }
        }
    }

    /// Records a step: each sample goes to the facade's exporters, and with the step's number to TensorBoard and the live
    /// view. Steps come in order.
    ///
    /// # Errors
    /// When TensorBoard's file cannot be written; the other exporters have the step all the same.
    pub fn step(&self, step: u64, samples: &[Sample]) -> Result<()> {
        let Some(outputs) = &self.0 else { return Ok(()) };
        for sample in samples {
            outputs.set(sample);
        }
        if let Some(view) = &outputs.view {
            view.step(step, samples);
        }
        match &outputs.events {
            Some(events) => events.lock().unwrap_or_else(PoisonError::into_inner).step(step, samples),
            None => Ok(()),
        }
    }
}

impl Outputs {
    fn set(&self, sample: &Sample) {
        let name = sample.metric.name;
        let key = match &sample.dimension {
            Some(dimension) => Key::from_parts(name, vec![Label::new("dimension", dimension.clone())]),
            None => Key::from_static_name(name),
        };
        match sample.metric.kind {
            Kind::Gauge => self.recorder.register_gauge(&key, &METADATA).set(sample.value),
            // As far as a counter can: it has no fractions and nothing below 0.
            Kind::Counter => self.recorder.register_counter(&key, &METADATA).absolute(sample.value as u64),
        }
    }
}
