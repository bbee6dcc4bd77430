//! Configs as people write them: TorchTitan's own, and wrong ones.
#![allow(clippy::unwrap_used)]

use ferrotitan_trainer::config::check::{Surroundings, World};
use ferrotitan_trainer::config::sections::DecayType;
use ferrotitan_trainer::config::{Loaded, Problem, Reporter, split};
use ferrotitan_trainer::plan::{Backend, Corpus, Dtype, Plan, Recompute, ScaleSharing, Tokenizer};

/// The keys of the debug model's file in TorchTitan 0.2.
const TORCHTITAN: &str = include_str!("data/torchtitan_debug_model.toml");

fn load(text: &str, flags: &str) -> Loaded {
    let (rest, flags) = split(flags.split_whitespace().map(str::to_owned));
    assert!(rest.is_empty(), "{rest:?} are no overrides");
    Loaded::from_text("run.toml", text, &flags)
}

/// All mistakes, of reading and of checking, on so many ranks.
fn mistakes(text: &str, flags: &str, ranks: Option<usize>) -> Vec<Problem> {
    let loaded = load(text, flags);
    let world = ranks.map(|size| World { size, says: format!("`--nproc {size}`") });
    let around = Surroundings { world, ..Surroundings::default() };
    loaded.with(Plan::new(&loaded.config, &around).err().unwrap_or_default())
}

/// The only mistake, as it is shown.
fn only(text: &str, flags: &str, ranks: Option<usize>) -> String {
    let found = mistakes(text, flags, ranks);
    assert_eq!(found.len(), 1, "{found:#?}");
    Reporter::new(false, 120).render(&load(text, flags), &found)
}

fn plan(text: &str, flags: &str) -> Plan {
    let loaded = load(text, flags);
    assert_eq!(loaded.problems, []);
    Plan::new(&loaded.config, &Surroundings::default()).unwrap().0
}

#[track_caller]
fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn a_file_of_torchtitan_means_what_it_means_there() {
    // On a machine that has neither its tokenizer nor its text.
    let plan = plan(TORCHTITAN, "--training.dataset_path c4_test --model.vocab_size 2048");
    assert_eq!((plan.steps, plan.data.seq_len, plan.data.global_batch, plan.data.accumulation), (10, 2048, 8, 1));
    assert_eq!(plan.model.parameters(), 6_163_712);
    assert_eq!(plan.metrics.flops_per_token, 71_585_280.0);
    assert_eq!((plan.optimizer.lr, plan.optimizer.betas, plan.optimizer.weight_decay), (8e-4, (0.9, 0.95), 0.1));
    assert_eq!(
        (plan.schedule.warmup, plan.schedule.decay_ratio, plan.schedule.decay),
        (2, Some(0.8), DecayType::Linear)
    );
    assert_eq!(plan.max_norm, Some(1.0));
    assert_eq!((plan.precision.parameters, plan.precision.compute), (Dtype::Float32, Dtype::BFloat16));
    assert_eq!(plan.data.tokenizer, Tokenizer::File("./tests/assets/tokenizer".into()));
    assert_eq!(plan.data.corpus, Corpus::JsonLines { path: "c4_test".into(), field: "text".into() });
    assert_eq!(plan.recompute, Recompute::Blocks { every: 2 });
    assert_eq!((plan.degrees.world_size(), plan.comm.backend), (1, Backend::Threads));
    assert_eq!(plan.validation, None);
}

#[test]
fn older_files_of_torchtitan_read_too() {
    let old = r#"
        [model]
        tokenizer_path = "byte"
        [lr_scheduler]
        lr_min = 0.1
        [training]
        batch_size = 4
        seed = 7
        compile = true
        [checkpoint]
        enable_checkpoint = false
        model_weights_only = false
        [float8]
        filter_fqns = ["output"]
        [validation]
        enabled = true
        [memory_estimation]
        enabled = false
    "#;
    let loaded = load(old, "");
    assert_eq!(loaded.problems, []);
    assert!(loaded.config.validation.enable && loaded.config.compile.enable);
    assert_eq!(loaded.config.quantize.linear.float8.filter_fqns.0, ["output"]);
    let plan = plan(old, "");
    assert_eq!((plan.schedule.floor, plan.data.local_batch, plan.seed), (0.1, 4, 7));
    let both = only("[training]\nseed = 1\n[debug]\nseed = 2\n", "", None);
    contains(&both, &["`training.seed` is the older name of `debug.seed`", "[run.toml:2:1]", "seed = 1"]);
}

#[test]
fn converters_are_checked_before_the_run() {
    let mx = plan("[model]\nconverters = [\"quantize.linear.mx\"]\n", "").float8.unwrap();
    assert_eq!((mx.sharing, mx.filter_fqns), (ScaleSharing::Block, vec!["output".to_owned()]));
    let text = only("[model]\nconverters = [\"float8\", \"mx\"]\n", "", None);
    contains(&text, &["at once", "[run.toml:2:1]", "keep one"]);
    let text = only("[quantize.linear.mx]\nrecipe_name = \"mxfp8_cublass\"\n", "", None);
    contains(&text, &["`mxfp8_cublass` is not `mxfp8_cublas` or `mxfp8_emulated`"]);
    let text = only("", "--model.converters quantize.linear.flaot8", None);
    contains(&text, &["there is no converter `quantize.linear.flaot8`", "the nearest is `quantize.linear.float8`"]);
    contains(&only("", "--model.converters quantize.grouped_mm.float8", None), &["experts of a mixture"]);
    let flags = "--model.converters float8 --quantize.linear.float8.recipe_name rowwise \
                 --quantize.linear.float8.enable_fsdp_float8_all_gather";
    contains(&only("", flags, None), &["needs the recipe \"tensorwise\", not \"rowwise\""]);
    contains(&only("", "--float8.amax_history 0", None), &["quantize.linear.float8.amax_history"]);
    let notes =
        load("", "--quantize.linear.mx.mxfp8_dim1_cast_kernel_choice cuda --float8.force_recompute_fp8_weight_in_bwd");
    assert_eq!(notes.notes().len(), 2);
}

#[test]
fn keys_without_a_meaning_are_noted_when_they_are_set() {
    let keys = |text: &str| load(text, "").notes().into_iter().map(|note| note.key).collect::<Vec<_>>();
    assert_eq!(keys(TORCHTITAN), [""; 0]);
    assert_eq!(keys("[training]\ngc_freq = 50\n[metrics]\nenable_wandb = true\n"), ["metrics.enable_wandb"]);
}

#[test]
fn an_unknown_key_has_a_nearest_one_and_a_line() {
    let text = only("[training]\nseq_len = 128\nseqlen = 64\n", "", None);
    contains(&text, &["unknown key `training.seqlen`", "`training.seq_len`", "[run.toml:3:1]", "seqlen = 64"]);
    contains(&only("[trainig]\nsteps = 1\n", "", None), &["unknown key `trainig`", "nearest known key is `training`"]);
    contains(&only("", "--optimiser.lr 1", None), &["`optimiser.lr`", "`optimizer.lr`", "--optimiser.lr 1"]);
    contains(&only("[training]\nwarmup_steps = 1\n", "", None), &["`lr_scheduler.warmup_steps`"]);
    contains(&only("training = 1\n", "", None), &["`training` is a section", "seq_len"]);
}

#[test]
fn a_wrong_type_has_its_line_and_what_would_be_right() {
    let text = only("[training]\n\nsteps = \"many\"\n", "", None);
    contains(&text, &["training.steps", "\"many\"", "integer", "[run.toml:3:1]", "steps = \"many\"", "10000"]);
    contains(&only("[optimizer]\nlr = true", "", None), &["the boolean `true` is not a number"]);
    contains(&only("[training]\nsteps = -1", "", None), &["the integer `-1` is not an integer of 0 or more"]);
    contains(&only("[model]\nconverters = [\"a\", 3]", "", None), &["model.converters", "converters = [\"a\", 3]"]);
    let text = only("[lr_scheduler]\ndecay_type = \"cosin\"", "", None);
    contains(&text, &["`cosin` is none of `linear`, `sqrt`, `cosine`"]);
    contains(&only("[training]\nsteps = 99999999999999999999", "", None), &["steps", "[run.toml:2:1]"]);
    contains(&only("[training.steps]\nx = 1", "", None), &["training.steps", "a table"]);
}

#[test]
fn broken_toml_says_where() {
    let text = only("[training]\nsteps = 3 4\n", "", None);
    contains(&text, &["this is not TOML", "[run.toml:2:", "steps = 3 4"]);
    let found = mistakes("[training]\nsteps = = 3\n", "", None);
    assert!(found.len() > 1 && found.iter().all(|problem| problem.message.contains("TOML")), "{found:#?}");
    contains(&only("[training]\nsteps = 1\nsteps = 2\n", "", None), &["duplicate key", "[run.toml:3:1]"]);
}

#[test]
fn overrides_lie_over_the_file() {
    let text = "[training]\nsteps = 10\nseq_len = 64\n[checkpoint]\nkeep_latest_k = 3\n";
    let flags = "--training.steps 20 --training.steps=30 --checkpoint.keep_latest_k 0 --lr_scheduler.decay_ratio .5 \
                 --model.converters a,b --checkpoint.enable --checkpoint.no_last_save_model_only \
                 --activation_checkpoint.selective_ac_option 3 --optimizer.lr 1 --model.tie_embeddings";
    let config = load(text, flags).config;
    assert_eq!((config.training.steps, config.training.seq_len), (30, 64));
    assert_eq!(config.checkpoint.keep_latest_k, 0);
    assert_eq!(config.model.converters.0, ["a", "b"]);
    assert_eq!((config.checkpoint.enable, config.checkpoint.last_save_model_only), (true, false));
    // A string of digits, and a whole number for a fraction.
    assert_eq!(config.activation_checkpoint.selective_ac_option, "3");
    assert_eq!(config.optimizer.lr, 1.0);
    assert_eq!(config.model.tie_embeddings, Some(true));
    assert_eq!(config.lr_scheduler.decay_ratio, Some(0.5));
}

#[test]
fn a_wrong_override_is_shown_as_it_was_typed() {
    contains(
        &only("", "--training.steps ten", None),
        &["training.steps", "`--training.steps ten` is on the command line"],
    );
    contains(&only("", "--training.steps=2.5", None), &["the number `2.5` is not an integer", "--training.steps=2.5"]);
    contains(&only("", "--training.steps", None), &["needs a value"]);
    contains(&only("", "--quantize.linear 3", None), &["is a section"]);
    contains(&only("", "--checkpoint.enable=perhaps", None), &["\"perhaps\"", "boolean"]);
}

#[test]
fn all_mistakes_come_at_once() {
    let text = r#"
        [training]
        steps = 0
        seqlen = 1
        local_batch_size = "8"
        dtype = "float64"
        [lr_scheduler]
        decay_ratio = 1.5
        [model]
        flavor = "7B"
        [parallelism]
        expert_parallel_degree = 2
        [checkpoint]
        enable = true
        interval = 0
        [surprise]
        key = 1
    "#;
    let found = mistakes(text, "--optimizer.lr=-1 --metrics.log_freq 0", Some(4));
    let keys: Vec<&str> = found.iter().map(|problem| problem.keys[0].as_str()).collect();
    let expected = [
        "training.seqlen",
        "surprise",
        "training.local_batch_size",
        "training.steps",
        "optimizer.lr",
        "lr_scheduler.decay_ratio",
        "metrics.log_freq",
        "parallelism.expert_parallel_degree",
        "checkpoint.interval",
        "model.flavor",
        "training.mixed_precision_param",
        "training.mixed_precision_reduce",
    ];
    let mut sorted = [keys.clone(), expected.to_vec()];
    sorted.iter_mut().for_each(|keys| keys.sort_unstable());
    assert_eq!(sorted[0], sorted[1]);
    let shown = Reporter::new(false, 120).render(&load(text, ""), &found);
    contains(&shown, &["12 mistakes in run.toml", "[run.toml:3:9]", "[run.toml:8:9]", "3B, 8B"]);
}

#[test]
fn degrees_must_multiply_to_the_ranks() {
    let degrees = "[parallelism]\ndata_parallel_replicate_degree = 3\ndata_parallel_shard_degree = 1\n";
    let text = only(degrees, "", Some(4));
    contains(
        &text,
        &[
            "data_parallel_replicate_degree 3",
            "is 3",
            "4 ranks of `--nproc 4`",
            "start 3 ranks",
            "to 4",
            "run.toml:2:1",
        ],
    );
    // What the ranks that are left come to.
    let leftover = "[parallelism]\ndata_parallel_replicate_degree = 3\n";
    contains(&only(leftover, "", Some(4)), &["does not divide the 4 ranks"]);
    let experts = only("", "--parallelism.expert_parallel_degree 2", None);
    contains(&experts, &["expert parallelism is not available", "expert_parallel_degree"]);
    contains(&only("", "--parallelism.data_parallel_replicate_degree 0", None), &["at least 1"]);
    contains(&only("", "--parallelism.data_parallel_shard_degree -2", None), &["-1"]);
    let huge =
        "--parallelism.data_parallel_replicate_degree 18446744073709551615 --parallelism.data_parallel_shard_degree 1";
    assert!(!mistakes("", huge, None).is_empty());
    let plan = plan("", "--parallelism.data_parallel_replicate_degree 4");
    assert_eq!((plan.degrees.world_size(), plan.data.global_batch), (4, 32));
}

#[test]
fn batches_must_divide() {
    let text = "[training]\nlocal_batch_size = 4\nglobal_batch_size = 12\n";
    assert_eq!(plan(text, "").data.accumulation, 3);
    let two = "--parallelism.data_parallel_replicate_degree 2";
    let shown = only(text, two, None);
    contains(&shown, &["a global batch of 12", "passes of 4 on 2", "8 or 16", "[run.toml:3:1]"]);
    assert_eq!(plan(text, "--parallelism.data_parallel_replicate_degree 3").data.accumulation, 1);
    contains(&only(text, "--training.global_batch_size 0", None), &["at least 1, or -1"]);
}

#[test]
fn shapes_must_fit() {
    contains(&only("[model]\nn_heads = 7\n", "", None), &["7 heads do not divide a width of 256", "4 or 8"]);
    contains(&only("[model]\nn_heads = 256\n", "--model.n_kv_heads 256", None), &["even"]);
    contains(&only("[model]\nn_kv_heads = 3\n", "", None), &["3 key-value heads", "2 or 4"]);
    contains(&only("[model]\nn_layers = 0\n", "", None), &["`model.n_layers` is 0"]);
    contains(&only("[model]\nflavor = \"debug\"\n", "", None), &["no flavor `debug`", "`debugmodel`"]);
    contains(&only("[model]\nname = \"gpt\"\n", "", None), &["no model `gpt`"]);
    let shape = plan("[model]\nn_layers = 2\nffn_dim = 512\nvocab_size = 300\n", "").model;
    assert_eq!((shape.n_layers, shape.hidden_dim, shape.vocab_size, shape.dim), (2, 512, 300, 256));
}

#[test]
fn precisions_must_fit() {
    let double = "--training.dtype float64";
    assert_eq!(mistakes("", double, None).len(), 2);
    let all = format!("{double} --training.mixed_precision_param float64 --training.mixed_precision_reduce float64");
    assert_eq!(plan("", &all).precision.compute, Dtype::Float64);
    contains(
        &only("", "--training.mixed_precision_param float64", None),
        &["kept in float32 cannot be used in float64"],
    );
    contains(&only("", "--training.mixed_precision_reduce bfloat16", None), &["summed over ranks in float32"]);
    contains(&only("", "--training.dtype float16", None), &["`float16` is none of"]);
}

#[test]
fn corpora_need_what_they_need() {
    contains(&only("", "--training.dataset jsonl", None), &["needs a path", "`training.dataset_path`"]);
    contains(&only("", "--training.dataset_path x", None), &["takes no path"]);
    contains(&only("", "--training.dataset json", None), &["no dataset `json`", "the nearest is `jsonl`"]);
    let tokenizer = |flags: &str| plan("", flags).data.tokenizer;
    assert_eq!(tokenizer(""), Tokenizer::Byte);
    assert_eq!(tokenizer("--model.hf_assets_path a --model.tokenizer_path byte"), Tokenizer::Byte);
    assert_eq!(tokenizer("--model.hf_assets_path a --model.vocab_size 9"), Tokenizer::File("a".into()));
    contains(&only("", "--model.hf_assets_path a", None), &["the tokenizer cannot be read", "a does not exist"]);
    contains(&only("", "--model.vocab_size 100", None), &["is 100, and the tokenizer has 258 tokens"]);
    assert_eq!(plan("", "").model.vocab_size, 258);
}

#[test]
fn the_backend_follows_the_mesh() {
    let backend = |flags: &str, around: Surroundings| {
        Plan::new(&load("", flags).config, &around).map(|(plan, _)| plan.comm.backend)
    };
    let two = "--parallelism.data_parallel_replicate_degree 2";
    assert_eq!(backend(two, Surroundings::default()), Ok(Backend::Threads));
    assert_eq!(backend(two, Surroundings { cuda_devices: 2, ..Surroundings::default() }), Ok(Backend::Processes));
    assert_eq!(backend(two, Surroundings { nodes: 2, ..Surroundings::default() }), Ok(Backend::Processes));
    assert_eq!(backend(two, Surroundings { separate: true, ..Surroundings::default() }), Ok(Backend::Processes));
    assert_eq!(backend(&format!("{two} --comm.mode fake_backend"), Surroundings::default()), Ok(Backend::Fake));
    // Two ranks want two devices.
    let one_device = backend(two, Surroundings { cuda_devices: 1, ..Surroundings::default() });
    assert!(one_device.unwrap_err()[0].message.contains("2 ranks on this machine need a CUDA device each"));
    let threads = format!("{two} --comm.backend threads");
    assert!(backend(&threads, Surroundings { nodes: 2, ..Surroundings::default() }).is_err());
    contains(&only("", "--comm.backend processes --comm.mode local_tensor", None), &["mode of local_tensor"]);
}

#[test]
fn a_warmup_longer_than_the_run_is_cut_and_noted() {
    let loaded = load("[training]\nsteps = 10\n", "");
    let (plan, notes) = Plan::new(&loaded.config, &Surroundings::default()).unwrap();
    assert_eq!((plan.schedule.steps, plan.schedule.warmup), (10, 10));
    assert_eq!(notes[0].key, "lr_scheduler.warmup_steps");
}

#[test]
fn presets_read() {
    for name in ["debugmodel", "8b", "70b", "405b"] {
        let path = format!("{}/../configs/llama3_{name}.toml", env!("CARGO_MANIFEST_DIR"));
        // On a machine that may not have their tokenizers.
        let (_, flags) = split(["--model.vocab_size=128256".to_owned()]);
        let loaded = Loaded::load(path.as_ref(), &flags).unwrap();
        assert_eq!(loaded.problems, [], "{name}");
        let planned = Plan::new(&loaded.config, &Surroundings::default());
        // The larger ones ask for what is not there yet, and for nothing that is wrong.
        let complaints = planned.err().unwrap_or_default();
        assert!(
            complaints.iter().all(|problem| problem.message.contains("is not available")),
            "{name}: {complaints:#?}"
        );
        assert!(name != "debugmodel" || complaints.is_empty(), "{complaints:#?}");
    }
}

#[test]
fn a_line_that_is_too_long_to_be_shown_is_named() {
    let text = format!("[training]\na = {}", "[".repeat(100_000));
    let deep = mistakes(&text, "", None);
    contains(&Reporter::new(false, 120).render(&load(&text, ""), &deep), &["recursion depth", "see run.toml:2:100005"]);
    let text = format!("[training]\nsteps = \"{}\"", "é".repeat(100_000));
    let shown = only(&text, "", None);
    contains(&shown, &["is not an integer", "see run.toml:2:1"]);
    assert!(shown.len() < 1000, "{shown}");
    let text = format!("[training]\nsteps = \"{}\" x", "é".repeat(100_000));
    contains(&only(&text, "", None), &["see run.toml:2:1000"]);
    let text = format!("[job]\ndescription = 3 # {}\n", "-".repeat(100_000));
    contains(&only(&text, "", None), &["see run.toml:2:1\n"]);
}

mod never_panics {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn on_any_text(text in "[\\PC\n]{0,80}") {
            let loaded = Loaded::from_text("run.toml", &text, &[]);
            let found = mistakes(&text, "", None);
            Reporter::new(true, 80).render(&loaded, &found);
        }

        #[test]
        fn on_any_number(value in prop_oneof![any::<i64>().prop_map(|n| n.to_string()), any::<f64>().prop_map(|x| x.to_string())], key in 0_usize..200) {
            let paths = ferrotitan_trainer::config::section::paths();
            let flag = format!("--{}={value}", paths[key % paths.len()]);
            let found = mistakes("", &flag, Some(2));
            Reporter::new(false, 80).render(&load("", &flag), &found);
        }
    }
}

#[test]
fn pipelines_are_checked_before_anything_is_built() {
    let two = "--parallelism.pipeline_parallel_degree 2";
    let with = |more: &str| only("", &format!("{two} {more}"), None);
    contains(&with("--parallelism.pipeline_parallel_schedule 2F2B"), &["2F2B", "1F1B"]);
    contains(&with("--parallelism.pipeline_parallel_microbatch_size 3"), &["microbatches of 3", "local batch of 8"]);
    contains(&with("--parallelism.pipeline_parallel_layers_per_stage 3"), &["stages"]);
    contains(&with("--parallelism.pipeline_parallel_schedule_csv /nowhere.csv"), &["No such file"]);
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("schedule.csv");
    let from = format!("--parallelism.pipeline_parallel_schedule_csv {}", csv.display());
    std::fs::write(&csv, "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n").unwrap();
    contains(&with(&from), &["for 2 ranks and 2 microbatches", "there are 2 and 8"]);
    let plan = plan("", &format!("{two} {from} --parallelism.pipeline_parallel_microbatch_size 4"));
    assert_eq!(plan.degrees.pp, 2);
    std::fs::write(&csv, "0B0,0F0\n1F0,1B0\n").unwrap();
    contains(&with(&format!("{from} --parallelism.pipeline_parallel_microbatch_size 8")), &["0B0"]);
}

#[test]
fn heads_are_not_split() {
    let tp = |more: &str| only("", &format!("--parallelism.tensor_parallel_degree {more}"), None);
    contains(&tp("17"), &["16 heads", "17 tensor-parallel ranks"]);
    contains(&tp("6 --model.n_kv_heads 4"), &["4 key-value heads", "6 tensor-parallel ranks"]);
    let uneven = plan("", "--parallelism.tensor_parallel_degree 3 --model.n_kv_heads 4");
    assert_eq!(uneven.degrees.tp, 3);
}
