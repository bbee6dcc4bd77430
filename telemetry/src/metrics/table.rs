//! Every metric of a run, once: what TensorBoard calls it, what Prometheus and OTLP call it, and its unit.

/// What a number counts. Values are given in base units everywhere; only TensorBoard's tags, which are TorchTitan's, have
/// units of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number without a unit.
    One,
    /// Bytes. TensorBoard: GiB.
    Bytes,
    /// Seconds.
    Seconds,
    /// A share, from 0 to 1. TensorBoard: per cent.
    Ratio,
}

impl Unit {
    /// What a value in base units is multiplied by to stand under its TensorBoard tag.
    pub fn tag_scale(self) -> f64 {
        match self {
            Unit::One | Unit::Seconds => 1.0,
            Unit::Bytes => 1.0 / (1_u64 << 30) as f64,
            Unit::Ratio => 100.0,
        }
    }

    /// The unit as the `metrics` facade has it.
    pub(crate) fn of_facade(self) -> Option<metrics::Unit> {
        match self {
            Unit::One | Unit::Ratio => None,
            Unit::Bytes => Some(metrics::Unit::Bytes),
            Unit::Seconds => Some(metrics::Unit::Seconds),
        }
    }
}

/// Whether a metric goes up and down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The value of the last step.
    Gauge,
    /// A total that only grows.
    Counter,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// Its name in the `metrics` facade, and so for Prometheus and OTLP.
    pub name: &'static str,
    /// Its tag in TensorBoard.
    pub tag: &'static str,
    /// Its unit in the facade.
    pub unit: Unit,
    /// Gauge or counter.
    pub kind: Kind,
    /// What it is, in words.
    pub help: &'static str,
}

impl Metric {
    /// This metric with a value, in base units.
    pub fn is(self, value: f64) -> Sample {
        Sample { metric: self, dimension: None, value }
    }

    /// This metric with a value, in base units, of one dimension of the mesh: the label `dimension`, and in TensorBoard
    /// the last part of the tag.
    pub fn on(self, dimension: impl Into<String>, value: f64) -> Sample {
        Sample { metric: self, dimension: Some(dimension.into()), value }
    }
}

/// A metric with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Which metric.
    pub metric: Metric,
    /// Of which dimension of the mesh, if of one.
    pub dimension: Option<String>,
    /// The value, in base units.
    pub value: f64,
}

impl Sample {
    /// The tag in TensorBoard.
    pub fn tag(&self) -> String {
        match &self.dimension {
            Some(dimension) => format!("{}/{dimension}", self.metric.tag),
            None => self.metric.tag.to_owned(),
        }
    }

    /// The value in the unit of its tag.
    pub fn tag_value(&self) -> f64 {
        self.value * self.metric.unit.tag_scale()
    }
}

/// What OTLP cannot carry, NaN and infinity, by the label `metric`. OTLP alone has it.
pub const NON_FINITE: &str = "ferrotitan_non_finite_total";

macro_rules! table {
    ($($(#[$about:meta])* $row:ident: $kind:ident, $unit:ident, $name:literal, $tag:literal, $help:literal;)*) => {
        $(
            #[doc = concat!($help, ". TensorBoard: `", $tag, "`; Prometheus and OTLP: `", $name, "`.")]
            pub const $row: Metric =
                Metric { name: $name, tag: $tag, unit: Unit::$unit, kind: Kind::$kind, help: $help };
        )*

        /// All rows of the table.
        pub const ALL: &[Metric] = &[$($row),*];
    };
}

table! {
    LOSS: Gauge, One, "ferrotitan_loss", "loss_metrics/global_avg_loss",
        "Mean loss of the valid tokens of the global batch, in nats";
    MAX_LOSS: Gauge, One, "ferrotitan_loss_max", "loss_metrics/global_max_loss",
        "Largest mean loss of the valid tokens of one rank, in nats";
    GRAD_NORM: Gauge, One, "ferrotitan_grad_norm", "grad_norm",
        "Norm of the global gradient before clipping";
    LEARNING_RATE: Gauge, One, "ferrotitan_learning_rate", "lr",
        "Learning rate of the step";
    TOKENS_SEEN: Counter, One, "ferrotitan_tokens_seen_total", "n_tokens_seen",
        "Tokens that all ranks have trained on";
    THROUGHPUT: Gauge, One, "ferrotitan_tokens_per_second", "throughput(tps)",
        "Tokens a second of one device";
    TFLOPS: Gauge, One, "ferrotitan_tflops", "tflops",
        "TFLOP/s of one device";
    MFU: Gauge, Ratio, "ferrotitan_mfu_ratio", "mfu(%)",
        "TFLOP/s as a share of the device's peak";
    STEP_TIME: Gauge, Seconds, "ferrotitan_step_seconds", "time_metrics/end_to_end(s)",
        "Time that the step took";
    DATA_TIME: Gauge, Seconds, "ferrotitan_data_loading_seconds", "time_metrics/data_loading(s)",
        "Time that the step waited for data";
    DATA_SHARE: Gauge, Ratio, "ferrotitan_data_loading_ratio", "time_metrics/data_loading(%)",
        "Time that the step waited for data as a share of the step";
    BUBBLE: Gauge, Ratio, "ferrotitan_pipeline_bubble_ratio", "time_metrics/pipeline_bubble(%)",
        "Share of the step in which this rank's pipeline stages had nothing to do, as measured";
    MEMORY_ACTIVE: Gauge, Bytes, "ferrotitan_memory_active_bytes", "memory/max_active(GiB)",
        "Most memory of the device that tensors had in use";
    MEMORY_ACTIVE_SHARE: Gauge, Ratio, "ferrotitan_memory_active_ratio", "memory/max_active(%)",
        "Most memory of the device that tensors had in use as a share of the device";
    MEMORY_RESERVED: Gauge, Bytes, "ferrotitan_memory_reserved_bytes", "memory/max_reserved(GiB)",
        "Most memory of the device that the allocator held";
    MEMORY_RESERVED_SHARE: Gauge, Ratio, "ferrotitan_memory_reserved_ratio", "memory/max_reserved(%)",
        "Most memory of the device that the allocator held as a share of the device";
    MEMORY_PROCESS: Gauge, Bytes, "ferrotitan_memory_process_bytes", "memory/max_process(GiB)",
        "Most memory of the host that the process had resident";
    ALLOC_RETRIES: Counter, One, "ferrotitan_memory_alloc_retries_total", "memory/num_alloc_retries",
        "Allocations that succeeded only after cached memory had been freed";
    OUT_OF_MEMORY: Counter, One, "ferrotitan_memory_ooms_total", "memory/num_ooms",
        "Allocations that failed for want of memory";
    VALIDATION_LOSS: Gauge, One, "ferrotitan_validation_loss", "validation_metrics/loss",
        "Mean loss of the valid tokens of the validation batches, in nats";
    COMM_BYTES: Gauge, Bytes, "ferrotitan_comm_sent_bytes", "comm_metrics/sent(GiB)",
        "Bytes that this rank sent in the step, by dimension of the mesh";
    COMM_TIME: Gauge, Seconds, "ferrotitan_comm_seconds", "comm_metrics/in_flight(s)",
        "Time in the step from the start to the end of each collective, by dimension of the mesh";
    COMM_EXPOSED: Gauge, Seconds, "ferrotitan_comm_exposed_seconds", "comm_metrics/exposed(s)",
        "Time in the step in which this rank stood still for collectives, by dimension of the mesh";
    SLOWEST_RANK: Gauge, One, "ferrotitan_slowest_rank", "comm_metrics/slowest_rank",
        "The rank that the others waited for most in the step, by dimension of the mesh";
    CHECKPOINT_STALL: Gauge, Seconds, "ferrotitan_checkpoint_stall_seconds", "checkpoint_metrics/stall(s)",
        "Time that training stood still for the last checkpoint";
    CHECKPOINT_COPY: Gauge, Seconds, "ferrotitan_checkpoint_copy_seconds", "checkpoint_metrics/copy(s)",
        "Time that the copy of the last checkpoint out of the device took";
    CHECKPOINT_WRITE: Gauge, Seconds, "ferrotitan_checkpoint_write_seconds", "checkpoint_metrics/write(s)",
        "Time that the writing of the last checkpoint took";
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_and_tags_are_of_one_row_each() {
        let names: BTreeSet<_> = ALL.iter().map(|metric| metric.name).collect();
        let tags: BTreeSet<_> = ALL.iter().map(|metric| metric.tag).collect();
        assert_eq!((names.len(), tags.len()), (ALL.len(), ALL.len()));
    }

    /// Prometheus' own conventions: base units as suffixes, `_total` for what only grows.
    #[test]
    fn a_name_says_its_unit() {
        for metric in ALL {
            assert!(metric.name.strip_prefix("ferrotitan_").is_some(), "{}", metric.name);
            assert!(metric.name.chars().all(|c| c == '_' || c.is_ascii_lowercase()), "{}", metric.name);
            let (suffix, in_tag) = match metric.unit {
                Unit::Bytes => ("_bytes", "(GiB)"),
                Unit::Seconds => ("_seconds", "(s)"),
                Unit::Ratio => ("_ratio", "(%)"),
                Unit::One => ("", ""),
            };
            assert!(metric.name.ends_with(suffix) && metric.tag.ends_with(in_tag), "{metric:?}");
            assert_eq!(metric.kind == Kind::Counter, metric.name.ends_with("_total"), "{}", metric.name);
            assert!(!metric.help.is_empty() && !metric.help.ends_with('.'), "{}", metric.name);
        }
    }

    #[test]
    fn a_tag_has_its_own_unit() {
        assert_eq!(MFU.is(0.5).tag_value(), 50.0);
        let sent = COMM_BYTES.on("tp", 3.0 * (1_u64 << 30) as f64);
        assert_eq!((sent.tag().as_str(), sent.tag_value()), ("comm_metrics/sent(GiB)/tp", 3.0));
        assert_eq!(LOSS.is(2.5).tag(), "loss_metrics/global_avg_loss");
    }
}
