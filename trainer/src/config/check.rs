//! What does not fit together in a config: every reason, before anything is allocated.

use super::available::{leftover_shards, unavailable};
use super::nearest::nearest;
use super::problem::Problem;
use super::sections::{BackendChoice, CommMode, DtypeName};
use super::{Config, check_values, shape::shape};
#[cfg(feature = "pp")]
use crate::plan::PipelinePlan;
use crate::plan::{CheckpointPlan, Float8Plan, TelemetryPlan};
use ferrotitan_mesh::Degrees;
use ferrotitan_nn::llama::LlamaConfig;

/// Whether the heads can be dealt to the tensor-parallel ranks: none is split, and key-value heads that are fewer than the
/// ranks are copied, equally often.
fn heads(config: &Config, model: &LlamaConfig) -> Option<Problem> {
    let degree = config.parallelism.tensor_parallel_degree;
    let key = "parallelism.tensor_parallel_degree";
    if degree > model.n_heads {
        let message = format!("{} heads cannot be dealt to {degree} tensor-parallel ranks", model.n_heads);
        return Some(Problem::new(&[key, "model.n_heads"], message).help(format!("at most {} fit", model.n_heads)));
    }
    if degree > model.n_kv_heads && !degree.is_multiple_of(model.n_kv_heads) {
        let message =
            format!("{} key-value heads cannot be copied evenly to {degree} tensor-parallel ranks", model.n_kv_heads);
        let help = format!("multiples of {} fit, and anything below", model.n_kv_heads);
        return Some(Problem::new(&[key, "model.n_kv_heads"], message).help(help));
    }
    None
}

/// What a run finds around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// Ranks that there are, and who says so; `None` where the config decides.
    pub world: Option<World>,
    /// Whether each rank is a process already, started by somebody else.
    pub separate: bool,
    /// Machines.
    pub nodes: usize,
    /// CUDA devices of this machine that libtorch can use.
    pub cuda_devices: usize,
}

impl Default for Surroundings {
    /// One machine without CUDA, as many ranks as the config asks for.
    fn default() -> Self {
        Self { world: None, separate: false, nodes: 1, cuda_devices: 0 }
    }
}

/// How many ranks there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// The number.
    pub size: usize,
    /// Who says so, for messages: `--nproc 2`, `WORLD_SIZE=2`.
    pub says: String,
}

/// Everything that is wrong with a config whose keys and types are right.
pub fn check(config: &Config, around: &Surroundings) -> Vec<Problem> {
    let mut problems = check_values::check(config);
    problems.extend(unavailable(config));
    match shape(config) {
        Ok(model) => {
            problems.extend(heads(config, &model));
            #[cfg(feature = "pp")]
            problems.extend(PipelinePlan::of(config, &model).err().into_iter().flatten());
        }
        Err(wrong) => problems.extend(wrong),
    }
    problems.extend(CheckpointPlan::of(config).err().into_iter().flatten());
    problems.extend(TelemetryPlan::of(config).err().into_iter().flatten());
    problems.extend(Float8Plan::of(config).err().into_iter().flatten());
    precision(config, &mut problems);
    data(config, &mut problems);
    match degrees(config, around) {
        Ok(degrees) => {
            backend(config, around, &degrees, &mut problems);
            if config.parallelism.data_parallel_shard_degree < 0 {
                problems.extend(leftover_shards(degrees.dp_shard));
            }
            batch(config, &degrees, &mut problems);
        }
        Err(problem) => problems.push(problem),
    }
    problems
}

/// The mesh that the config asks for among the ranks that there are.
///
/// # Errors
/// When no mesh of these degrees has that many ranks.
pub fn degrees(config: &Config, around: &Surroundings) -> Result<Degrees, Problem> {
    const SHARD: &str = "parallelism.data_parallel_shard_degree";
    const REPLICATE: &str = "parallelism.data_parallel_replicate_degree";
    let p = &config.parallelism;
    let named = [
        ("pipeline_parallel_degree", p.pipeline_parallel_degree),
        ("data_parallel_replicate_degree", p.data_parallel_replicate_degree),
        ("context_parallel_degree", p.context_parallel_degree),
        ("tensor_parallel_degree", p.tensor_parallel_degree),
    ];
    for (name, degree) in named {
        if degree == 0 {
            let key = format!("parallelism.{name}");
            return Err(Problem::new(&[&key], format!("`{key}` is 0, and must be at least 1")));
        }
    }
    if p.data_parallel_shard_degree == 0 || p.data_parallel_shard_degree < -1 {
        let message = format!("`{SHARD}` is {}, and must be at least 1, or -1", p.data_parallel_shard_degree);
        return Err(Problem::new(&[SHARD], message).help("-1 takes all ranks that the other degrees leave"));
    }
    let shard = usize::try_from(p.data_parallel_shard_degree).ok();
    let product = named.iter().try_fold(shard.unwrap_or(1), |product, (_, degree)| product.checked_mul(*degree));
    let Some(product) = product.filter(|product| *product <= 1 << 24) else {
        return Err(Problem::new(&[REPLICATE], "the degrees multiply to more ranks than any machine has"));
    };
    let degrees = |dp_shard| Degrees {
        pp: p.pipeline_parallel_degree,
        dp_replicate: p.data_parallel_replicate_degree,
        dp_shard,
        cp: p.context_parallel_degree,
        tp: p.tensor_parallel_degree,
    };
    let Some(world) = &around.world else { return Ok(degrees(shard.unwrap_or(1))) };
    match shard {
        None if world.size.is_multiple_of(product) => return Ok(degrees(world.size / product)),
        Some(shard) if world.size == product => return Ok(degrees(shard)),
        _ => {}
    }

    // Name the degrees that make the product what it is.
    let mut factors: Vec<(&str, usize)> = named.into_iter().collect();
    factors.extend(shard.map(|shard| ("data_parallel_shard_degree", shard)));
    factors.retain(|(_, degree)| *degree != 1);
    let keys: Vec<String> = match factors.as_slice() {
        [] => vec![REPLICATE.to_owned()],
        some => some.iter().map(|(name, _)| format!("parallelism.{name}")).collect(),
    };
    let words: Vec<String> = factors.iter().map(|(name, degree)| format!("{name} {degree}")).collect();
    let words = if words.is_empty() { "all degrees are 1".to_owned() } else { words.join(" × ") };
    let verb = if shard.is_none() { "does not divide" } else { "is not" };
    let size = world.size;
    let message =
        format!("the product of the degrees ({words}) is {product}, which {verb} the {size} ranks of {}", world.says);
    let fits = match product / p.data_parallel_replicate_degree {
        rest if size.is_multiple_of(rest) => format!(", or set `{REPLICATE}` to {}", size / rest),
        _ => String::new(),
    };
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    Err(Problem::new(&keys, message).help(format!("start {product} ranks{fits}")))
}

/// The backend that the config asks for, before "auto" is decided.
///
/// # Errors
/// When TorchTitan's key of it says something else.
pub fn backend_choice(config: &Config) -> Result<BackendChoice, Problem> {
    let by_mode = match config.comm.mode {
        CommMode::Default => return Ok(config.comm.backend),
        CommMode::FakeBackend => BackendChoice::Fake,
        CommMode::LocalTensor => BackendChoice::Threads,
    };
    if config.comm.backend == BackendChoice::Auto || config.comm.backend == by_mode {
        return Ok(by_mode);
    }
    let message = format!("a mode of {} is not a backend of {}", config.comm.mode, config.comm.backend);
    Err(Problem::new(&["comm.mode", "comm.backend"], message).help("leave `comm.mode` at \"default\""))
}

fn backend(config: &Config, around: &Surroundings, degrees: &Degrees, problems: &mut Vec<Problem>) {
    let choice = match backend_choice(config) {
        Ok(choice) => choice,
        Err(problem) => return problems.push(problem),
    };
    let ranks = degrees.world_size();
    if choice == BackendChoice::Threads && (around.nodes > 1 || (around.separate && ranks > 1)) {
        let why = if around.nodes > 1 {
            format!("threads of one process, and there are {} machines", around.nodes)
        } else {
            "threads of one process, and each rank is a process already".to_owned()
        };
        let problem = Problem::new(&["comm.backend"], format!("the ranks would be {why}"));
        problems.push(problem.help("set `comm.backend` to \"processes\" or \"auto\""));
    }
    if around.nodes > ranks {
        let message = format!("{} machines cannot share {ranks} ranks", around.nodes);
        let problem = Problem::new(&["parallelism.data_parallel_shard_degree"], message);
        problems.push(problem.help("say how many ranks each machine starts, with --nproc"));
    }
    let local = ranks.div_ceil(around.nodes.max(1));
    // Threads compute on the CPU.
    let on_cuda = !matches!(choice, BackendChoice::Fake | BackendChoice::Threads);
    if around.cuda_devices > 0 && on_cuda && local > around.cuda_devices {
        let message =
            format!("{local} ranks on this machine need a CUDA device each, and there are {}", around.cuda_devices);
        let problem = Problem::new(&["parallelism.data_parallel_replicate_degree"], message);
        problems.push(problem.help("start fewer ranks, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"));
    }
}

fn batch(config: &Config, degrees: &Degrees, problems: &mut Vec<Problem>) {
    let (local, global) = (config.training.local_batch_size, config.training.global_batch_size);
    let ranks = (degrees.dp_replicate * degrees.dp_shard) as u64;
    let Ok(global) = u64::try_from(global) else { return };
    let Some(pass) = local.checked_mul(ranks).filter(|pass| *pass > 0) else { return };
    if global > 0 && !global.is_multiple_of(pass) {
        let keys = ["training.global_batch_size", "training.local_batch_size"];
        let message =
            format!("a global batch of {global} cannot be made of passes of {local} on {ranks} data-parallel ranks");
        let (below, above) = (global / pass * pass, global.div_ceil(pass).saturating_mul(pass));
        let near = if below == 0 { above.to_string() } else { format!("{below} or {above}") };
        problems.push(Problem::new(&keys, message).help(format!("multiples of {pass} fit: {near}")));
    }
}

fn precision(config: &Config, problems: &mut Vec<Problem>) {
    use DtypeName::{BFloat16, Float32, Float64};
    let training = &config.training;
    let compute_fits = match training.dtype {
        Float64 => training.mixed_precision_param == Float64,
        Float32 => training.mixed_precision_param != Float64,
        BFloat16 => training.mixed_precision_param == BFloat16,
    };
    if !compute_fits {
        let keys = ["training.mixed_precision_param", "training.dtype"];
        let (dtype, param) = (training.dtype, training.mixed_precision_param);
        let message = format!("parameters kept in {dtype} cannot be used in {param}");
        let right =
            if training.dtype == Float32 { "\"float32\" or \"bfloat16\"".to_owned() } else { format!("\"{dtype}\"") };
        let problem = Problem::new(&keys, message);
        problems
            .push(problem.help(format!("set `training.mixed_precision_param` to {right}, or change `training.dtype`")));
    }
    let reduce = if training.dtype == Float64 { Float64 } else { Float32 };
    if training.mixed_precision_reduce != reduce {
        let keys = ["training.mixed_precision_reduce", "training.dtype"];
        let message = format!(
            "gradients of parameters kept in {} are summed over ranks in {reduce}, not in {}",
            training.dtype, training.mixed_precision_reduce
        );
        problems
            .push(Problem::new(&keys, message).help(format!("set `training.mixed_precision_reduce` to \"{reduce}\"")));
    }
}

/// The kinds of corpus, and whether each needs a path.
pub(crate) const DATASETS: &[(&str, bool)] = &[
    ("cargo", false),
    ("text", true),
    ("jsonl", true),
    ("parquet", true),
    ("c4", true),
    ("c4_test", true),
    ("c4_validation", true),
];

fn data(config: &Config, problems: &mut Vec<Problem>) {
    let training = &config.training;
    corpus("training", &training.dataset, training.dataset_path.as_deref(), true, problems);
    let validation = &config.validation;
    if validation.enable && validation.dataset_path.is_some() {
        corpus("validation", &validation.dataset, validation.dataset_path.as_deref(), false, problems);
    }
}

fn corpus(section: &str, dataset: &str, path: Option<&str>, alone: bool, problems: &mut Vec<Problem>) {
    let (dataset_key, path_key) = (format!("{section}.dataset"), format!("{section}.dataset_path"));
    let Some((_, needs_path)) = DATASETS.iter().find(|(name, _)| *name == dataset) else {
        let names: Vec<_> = DATASETS.iter().map(|(name, _)| *name).collect();
        let near = nearest(dataset, names.iter().copied()).unwrap_or_default();
        let problem = Problem::new(&[&dataset_key], format!("there is no dataset `{dataset}`"));
        return problems.push(problem.help(format!("the nearest is `{near}`; there are {}", names.join(", "))));
    };
    if *needs_path && path.is_none_or(str::is_empty) {
        let message = format!("the dataset `{dataset}` needs a path");
        let help = format!("set `{path_key}` to a file, a folder, a glob or an object-store URL");
        problems.push(Problem::new(&[&path_key, &dataset_key], message).help(help));
    }
    if !needs_path && path.is_some() && alone {
        let message = format!("the dataset `{dataset}` is on every machine, and takes no path");
        let problem = Problem::new(&[&path_key, &dataset_key], message);
        problems
            .push(problem.help("set `training.dataset` to \"text\", \"jsonl\" or \"parquet\" for files of your own"));
    }
}
