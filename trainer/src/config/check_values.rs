//! Ranges of single values.

use super::Config;
use super::nearest::nearest;
use super::problem::Problem;
use crate::plan::{Balance, Reshard};

/// Every value that is out of its range by itself.
pub(super) fn check(config: &Config) -> Vec<Problem> {
    let mut values = Values(Vec::new());
    let (training, optimizer, schedule) = (&config.training, &config.optimizer, &config.lr_scheduler);

    values.positive("training.local_batch_size", training.local_batch_size);
    values.positive_or_all("training.global_batch_size", training.global_batch_size);
    values.positive("training.seq_len", training.seq_len);
    values.positive("training.steps", training.steps);
    values.number("training.max_norm", training.max_norm, |x| x >= 0.0, "0 or more; 0 means no clipping");
    if let Some(bytes) = training.dataset_max_bytes {
        values.positive("training.dataset_max_bytes", bytes);
    }

    if optimizer.name != "AdamW" {
        let near = nearest(&optimizer.name, ["AdamW"]).unwrap_or_default();
        let problem = Problem::new(&["optimizer.name"], format!("there is no optimizer `{}`", optimizer.name));
        values.0.push(problem.help(format!("set it to \"{near}\"")));
    }
    values.number("optimizer.lr", optimizer.lr, |x| x > 0.0, "more than 0");
    values.number("optimizer.beta1", optimizer.beta1, |x| (0.0..1.0).contains(&x), "at least 0 and less than 1");
    values.number("optimizer.beta2", optimizer.beta2, |x| (0.0..1.0).contains(&x), "at least 0 and less than 1");
    values.number("optimizer.eps", optimizer.eps, |x| x > 0.0, "more than 0");
    values.number("optimizer.weight_decay", optimizer.weight_decay, |x| x >= 0.0, "0 or more");

    if let Some(ratio) = schedule.decay_ratio {
        values.number("lr_scheduler.decay_ratio", ratio, |x| x > 0.0 && x <= 1.0, "more than 0 and at most 1");
    }
    let in_unit = |x| (0.0..=1.0).contains(&x);
    values.number("lr_scheduler.min_lr_factor", schedule.min_lr_factor, in_unit, "from 0 to 1");
    if let Some(steps) = schedule.total_steps {
        values.positive("lr_scheduler.total_steps", steps);
    }

    values.positive("metrics.log_freq", config.metrics.log_freq);
    if let Some(peak) = config.metrics.peak_tflops {
        values.number("metrics.peak_tflops", peak, |x| x > 0.0, "more than 0");
    }
    if let Some(theta) = config.model.rope_theta {
        values.number("model.rope_theta", theta, |x| x > 0.0, "more than 0");
    }
    if let Some(eps) = config.model.norm_eps {
        values.number("model.norm_eps", eps, |x| x >= 0.0, "0 or more");
    }

    values.positive("quantize.linear.float8.amax_history", config.quantize.linear.float8.amax_history);
    values.positive("comm.init_timeout_seconds", config.comm.init_timeout_seconds);
    values.positive("comm.train_timeout_seconds", config.comm.train_timeout_seconds);

    if config.validation.enable {
        values.positive("validation.local_batch_size", config.validation.local_batch_size);
        values.positive("validation.seq_len", config.validation.seq_len);
        values.positive("validation.freq", config.validation.freq);
        values.positive_or_all("validation.steps", config.validation.steps);
    }
    if config.job.dump_folder.is_empty() {
        values.0.push(Problem::new(&["job.dump_folder"], "`job.dump_folder` is empty").help("\".\" is this folder"));
    }
    let reshard = config.parallelism.fsdp_reshard_after_forward.as_str();
    if Reshard::of(reshard).is_none() {
        let key = "parallelism.fsdp_reshard_after_forward";
        let message =
            format!("`{key}` is \"{reshard}\", and must be \"default\", \"always\", \"never\" or a number of ranks");
        values.0.push(Problem::new(&[key], message));
    }
    let balancer = config.parallelism.context_parallel_load_balancer.as_deref();
    if Balance::of(balancer).is_none() {
        let balancer = balancer.unwrap_or_default();
        let key = "parallelism.context_parallel_load_balancer";
        let message = format!("`{key}` is \"{balancer}\", and must be \"headtail\", \"documents\" or \"contiguous\"");
        values.0.push(Problem::new(&[key], message));
    }
    let option = &config.activation_checkpoint.selective_ac_option;
    if option != "op" && !option.parse::<u64>().is_ok_and(|n| n > 0) {
        let key = "activation_checkpoint.selective_ac_option";
        let message = format!("`{key}` is \"{option}\", and must be \"op\" or a number of 1 or more");
        values.0.push(Problem::new(&[key], message));
    }
    values.0
}

struct Values(Vec<Problem>);

impl Values {
    fn positive(&mut self, key: &str, value: u64) {
        // Sizes of this kind are multiplied with each other, and must stay within 64 bits.
        if !(1..=1 << 40).contains(&value) {
            self.0.push(Problem::new(&[key], format!("`{key}` is {value}, and must be from 1 to 2^40")));
        }
    }

    fn positive_or_all(&mut self, key: &str, value: i64) {
        if value != -1 && !(1..=1 << 40).contains(&value) {
            self.0.push(Problem::new(&[key], format!("`{key}` is {value}, and must be at least 1, or -1 for all")));
        }
    }

    fn number(&mut self, key: &str, value: f64, right: impl Fn(f64) -> bool, range: &str) {
        if !value.is_finite() || !right(value) {
            self.0.push(Problem::new(&[key], format!("`{key}` is {value}, and must be {range}")));
        }
    }
}
