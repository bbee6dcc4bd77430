//! From what a step measured to what is told of it.

use crate::config::sections::MfuConvention;
use std::io;

/// What a step measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepMetrics {
    /// The step, counted from 1.
    pub step: u64,
    /// Mean loss of a token of the global batch, in nats.
    pub loss: f64,
    /// Norm of the global gradient, before clipping.
    pub grad_norm: f64,
    /// The learning rate of the step.
    pub lr: f64,
    /// Tokens of the step, over all ranks.
    pub tokens: u64,
    /// Seconds that the step took.
    pub seconds: f64,
    /// Memory of the device, at its peak.
    pub memory: Memory,
    /// More numbers by name.
    pub extras: Vec<(String, f64)>,
}

/// Memory of a device, at its peak.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Bytes in use.
    pub bytes: u64,
    /// Bytes of the device, where that is known.
    pub capacity: Option<u64>,
}

impl Memory {
    /// In GiB.
    pub fn gib(&self) -> f64 {
        self.bytes as f64 / (1_u64 << 30) as f64
    }

    /// Per cent of the device.
    pub fn percent(&self) -> Option<f64> {
        self.capacity.filter(|capacity| *capacity > 0).map(|capacity| 100.0 * self.bytes as f64 / capacity as f64)
    }
}

/// What a token costs, and what a device could do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// FLOPs of a token, forward and backward.
    pub flops_per_token: f64,
    /// How attention counts in them.
    pub convention: MfuConvention,
    /// Peak of a device, in TFLOP/s, where that is known.
    pub peak_tflops: Option<f64>,
    /// Devices that share a step.
    pub ranks: usize,
}

/// What is told of a step: [`StepMetrics`], and what follows from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// What was measured.
    pub step: StepMetrics,
    /// What a token costs.
    pub cost: Cost,
    /// Tokens a second on one device.
    pub tps: f64,
    /// TFLOP/s of one device.
    pub tflops: f64,
    /// Per cent of the device's peak, where that is known.
    pub mfu: Option<f64>,
}

impl Record {
    /// What follows from a step's measurements.
    pub fn new(step: StepMetrics, cost: Cost) -> Self {
        let tps = step.tokens as f64 / step.seconds / cost.ranks.max(1) as f64;
        let tflops = cost.flops_per_token * tps / 1e12;
        let mfu = cost.peak_tflops.map(|peak| 100.0 * tflops / peak);
        Self { step, cost, tps, tflops, mfu }
    }
}

/// Somewhere that records go.
pub trait Sink: Send {
    /// Takes one record. Records come in the order of their steps.
    ///
    /// # Errors
    /// When it cannot be written.
    fn record(&mut self, record: &Record) -> io::Result<()>;
}

/// Everywhere that records go.
pub struct Metrics {
    cost: Cost,
    sinks: Vec<Box<dyn Sink>>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").field("cost", &self.cost).field("sinks", &self.sinks.len()).finish()
    }
}

impl Metrics {
    /// To nowhere yet.
    pub fn new(cost: Cost) -> Self {
        Self { cost, sinks: Vec::new() }
    }

    /// The same, and to this one too.
    #[must_use]
    pub fn to(mut self, sink: impl Sink + 'static) -> Self {
        self.sinks.push(Box::new(sink));
        self
    }

    /// Tells of a step.
    ///
    /// # Errors
    /// When a sink cannot write; the others have their record all the same.
    pub fn log(&mut self, step: &StepMetrics) -> io::Result<()> {
        let record = Record::new(step.clone(), self.cost);
        let mut result = Ok(());
        for sink in &mut self.sinks {
            result = result.and(sink.record(&record));
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost() -> Cost {
        Cost { flops_per_token: 2e9, convention: MfuConvention::Full, peak_tflops: Some(100.0), ranks: 4 }
    }

    #[test]
    fn rates_are_of_one_device() {
        let step = StepMetrics { tokens: 80_000, seconds: 2.0, ..StepMetrics::default() };
        let record = Record::new(step.clone(), cost());
        assert_eq!(record.tps, 10_000.0);
        assert_eq!(record.tflops, 20.0);
        assert_eq!(record.mfu, Some(20.0));
        let unknown = Record::new(step, Cost { peak_tflops: None, ..cost() });
        assert_eq!((unknown.tflops, unknown.mfu), (20.0, None));
    }

    #[test]
    fn one_broken_sink_does_not_starve_the_next() {
        struct Broken;
        impl Sink for Broken {
            fn record(&mut self, _: &Record) -> io::Result<()> {
                Err(io::Error::other("full"))
            }
        }
        struct Count(std::sync::mpsc::Sender<u64>);
        impl Sink for Count {
            fn record(&mut self, record: &Record) -> io::Result<()> {
                self.0.send(record.step.step).map_err(io::Error::other)
            }
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        let mut metrics = Metrics::new(cost()).to(Broken).to(Count(sender));
        assert!(metrics.log(&StepMetrics { step: 7, ..StepMetrics::default() }).is_err());
        assert_eq!(receiver.try_recv(), Ok(7));
    }
}
