//! A layout is invisible in the result: the binary's losses and gradient norms on several ranks are those of one.
#![allow(clippy::unwrap_used)]

mod support;

use support::{Run, Step};

/// Every loss and every norm of ten steps, to a relative tolerance.
fn assert_same(name: &str, ours: &[Step], reference: &[Step], tolerance: f64) {
    assert_eq!(ours.len(), 10, "{name}");
    for (ours, reference) in ours.iter().zip(reference) {
        let off = |a: f64, b: f64| (a - b).abs() / b.abs();
        let worst = off(ours.loss, reference.loss).max(off(ours.grad_norm, reference.grad_norm));
        assert!(worst <= tolerance, "{name}, step {}: off by {worst:e}: {ours:?} {reference:?}", ours.step);
    }
}

/// A run of ten steps of a global batch of eight sequences.
fn run(dtype: &str, ranks: usize, accumulation: usize) -> Run {
    run_of(8, dtype, ranks, accumulation)
}

/// A run of ten steps of a global batch.
fn run_of(batch: usize, dtype: &str, ranks: usize, accumulation: usize) -> Run {
    let local = batch / ranks / accumulation;
    Run::new()
        .set("training.dtype", dtype)
        .set("training.mixed_precision_param", dtype)
        .set("training.mixed_precision_reduce", dtype)
        .set("training.global_batch_size", batch)
        .set("training.local_batch_size", local)
        .set("parallelism.data_parallel_replicate_degree", ranks)
}

#[test]
fn replicas_and_accumulation_on_threads() {
    for (dtype, tolerance) in [("float64", 1e-10), ("float32", 1e-4)] {
        let reference = run_of(16, dtype, 1, 1).steps();
        for ranks in [1, 2, 4] {
            for accumulation in [1, 2, 4] {
                let name = format!("{dtype}, {ranks} ranks, accumulation {accumulation}");
                assert_same(&name, &run_of(16, dtype, ranks, accumulation).steps(), &reference, tolerance);
            }
        }
    }
}

#[test]
fn replicas_and_accumulation_on_processes() {
    let reference = run_of(16, "float64", 1, 1).steps();
    for (ranks, accumulation) in [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)] {
        let steps = run_of(16, "float64", ranks, accumulation).set("comm.backend", "processes").nproc(ranks).steps();
        assert_same(&format!("{ranks} processes, accumulation {accumulation}"), &steps, &reference, 1e-10);
    }
    // Single precision, whose sums Gloo makes in another order.
    let reference = run("float32", 1, 1).steps();
    let steps = run("float32", 2, 1).set("comm.backend", "processes").nproc(2).steps();
    assert_same("2 processes in float32", &steps, &reference, 1e-4);
}

#[test]
fn every_dimension_on_processes() {
    let reference = run("float64", 1, 1).steps();
    for dimension in [SHARD, TENSOR, CONTEXT, PIPELINE] {
        let run = run("float64", 1, 1)
            .set("training.local_batch_size", if dimension == SHARD { 4 } else { 8 })
            .set(&format!("parallelism.{dimension}_degree"), 2)
            .set("comm.backend", "processes");
        assert_same(&format!("{dimension} on 2 processes"), &run.nproc(2).steps(), &reference, 1e-10);
    }
}

#[test]
fn packed_documents_and_recomputation() {
    let packed = |ranks| run("float64", ranks, 1).set("model.attn_mask_type", "block_causal");
    let reference = packed(1).steps();
    assert_same("2 ranks", &packed(2).steps(), &reference, 1e-10);
    let recomputed = packed(2).set("activation_checkpoint.mode", "full").steps();
    assert_same("2 ranks, activations recomputed", &recomputed, &reference, 1e-10);
    let selective = packed(2).set("activation_checkpoint.mode", "selective");
    let recomputed = selective.set("activation_checkpoint.selective_ac_option", "op").steps();
    assert_same("2 ranks, activations recomputed by operation", &recomputed, &reference, 1e-10);
    // On a CPU there is nowhere else to be.
    let offloaded = packed(2).set("training.enable_cpu_offload", "true").steps();
    assert_same("2 ranks, parameters in CPU memory", &offloaded, &reference, 1e-10);
    let causal = run("float64", 1, 1).set("model.attn_mask_type", "causal").steps();
    assert_ne!(causal[0].loss, reference[0].loss, "the mask changes what a token sees");
}

/// Every mesh of these degrees, on threads, with documents packed into its sequences.
fn assert_meshes_same(meshes: &[&[(&str, usize)]]) {
    let reference = run("float64", 1, 1).steps();
    for mesh in meshes {
        let data_parallel: usize = mesh.iter().filter(|(name, _)| name.starts_with("data")).map(|(_, n)| n).product();
        let mut run = run("float64", 1, 1).set("training.local_batch_size", 8 / data_parallel);
        for (dimension, degree) in *mesh {
            run = run.set(&format!("parallelism.{dimension}_degree"), degree);
        }
        assert_same(&format!("{mesh:?}"), &run.steps(), &reference, 1e-10);
    }
}

const SHARD: &str = "data_parallel_shard";
const REPLICATE: &str = "data_parallel_replicate";
const TENSOR: &str = "tensor_parallel";
const CONTEXT: &str = "context_parallel";
const PIPELINE: &str = "pipeline_parallel";

#[test]
fn one_dimension_at_a_time() {
    assert_meshes_same(&[
        &[(SHARD, 2)],
        &[(SHARD, 4)],
        &[(TENSOR, 2)],
        &[(TENSOR, 4)],
        &[(CONTEXT, 2)],
        &[(CONTEXT, 3)],
    ]);
}

#[test]
fn several_dimensions_at_once() {
    assert_meshes_same(&[
        &[(REPLICATE, 2), (SHARD, 2)],
        &[(SHARD, 2), (TENSOR, 2)],
        &[(SHARD, 2), (CONTEXT, 2)],
        &[(CONTEXT, 2), (TENSOR, 2)],
        &[(REPLICATE, 2), (SHARD, 2), (CONTEXT, 2), (TENSOR, 2)],
    ]);
}

#[test]
fn every_schedule_of_a_pipeline() {
    let deep = |ranks: usize| {
        let run = run("float64", 1, 1).set("model.n_layers", 6).set("training.steps", 10);
        run.set("parallelism.pipeline_parallel_degree", ranks)
    };
    let reference = deep(1).steps();
    let schedules =
        ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"];
    for schedule in schedules {
        let steps = deep(2).set("parallelism.pipeline_parallel_schedule", schedule).steps();
        assert_same(schedule, &steps, &reference, 1e-10);
    }
    // Fewer microbatches than stages, and four ranks.
    let few = deep(4).set("parallelism.pipeline_parallel_microbatch_size", 4).steps();
    assert_same("4 ranks, 2 microbatches", &few, &reference, 1e-10);
}

#[test]
fn four_dimensions_on_sixteen_ranks() {
    let reference = run("float64", 1, 1).steps();
    for accumulation in [1, 2] {
        let mut mesh = run("float64", 1, 1)
            .set("training.local_batch_size", 4 / accumulation)
            .set("parallelism.pipeline_parallel_microbatch_size", 1)
            .set("model.tie_embeddings", "false");
        for dimension in [PIPELINE, SHARD, CONTEXT, TENSOR] {
            mesh = mesh.set(&format!("parallelism.{dimension}_degree"), 2);
        }
        assert_same(&format!("accumulation {accumulation}"), &mesh.steps(), &reference, 1e-10);
    }
}

#[test]
fn tied_embeddings_on_two_stages() {
    let tied = |stages: usize, shards: usize| {
        run("float64", 1, 1)
            .set("model.tie_embeddings", "true")
            .set("training.local_batch_size", 8 / shards)
            .set(&format!("parallelism.{PIPELINE}_degree"), stages)
            .set(&format!("parallelism.{SHARD}_degree"), shards)
    };
    let reference = tied(1, 1).steps();
    assert_same("2 stages", &tied(2, 1).steps(), &reference, 1e-10);
    assert_same("2 stages of 2 shards", &tied(2, 2).steps(), &reference, 1e-10);
}

#[test]
fn validation_is_of_the_same_samples() {
    let validated = |ranks: usize| {
        let run = run("float64", ranks, 1)
            .set("validation.enable", "true")
            .set("validation.freq", 10)
            .set("validation.steps", 3)
            .set("validation.local_batch_size", 2)
            .set("validation.seq_len", 16)
            .set("validation.dataset", "text");
        let corpus = run.path("corpus").display().to_string();
        let run = run.set("validation.dataset_path", corpus);
        let output = run.output();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("validate step: 10"));
        let metrics = std::fs::read_to_string(run.path("out/metrics.jsonl")).unwrap();
        let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        last["validation_loss"].as_f64().unwrap()
    };
    let reference = validated(1);
    for ranks in [2, 4] {
        assert!((validated(ranks) / reference - 1.0).abs() < 1e-10, "{ranks} ranks");
    }
}

#[test]
fn float8_trains_alike_on_one_rank_and_on_many() {
    let float8 = |mesh: &[(&str, usize)]| {
        let data_parallel: usize = mesh.iter().filter(|(name, _)| name.starts_with("data")).map(|(_, n)| n).product();
        let mut run = run("float32", 1, 1)
            .set("training.local_batch_size", 8 / data_parallel)
            .set("training.mixed_precision_param", "bfloat16")
            .set("model.converters", "float8")
            .set("quantize.linear.float8.enable_fsdp_float8_all_gather", "true")
            .set("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", "true");
        for (dimension, degree) in mesh {
            run = run.set(&format!("parallelism.{dimension}_degree"), degree);
        }
        run.steps()
    };
    let reference = float8(&[]);
    let plain = run("float32", 1, 1).steps();
    assert_ne!(reference[9].loss, plain[9].loss, "eight bits show");
    for mesh in [&[(SHARD, 2)][..], &[(SHARD, 2), (TENSOR, 2)]] {
        for (ours, reference) in float8(mesh).iter().zip(&reference) {
            assert!((ours.loss / reference.loss - 1.0).abs() < 0.02, "{mesh:?}: {ours:?} {reference:?}");
        }
    }
}

/// Blocks of 32 lie along what a product sums over. Where no rank's part of it cuts a block, every layout has the same
/// blocks: here widths of 64 on two ranks, and sequences of 32 tokens, which data parallelism deals out whole.
#[test]
fn microscaling_has_the_same_blocks_on_every_mesh() {
    let mx = |mesh: &[(&str, usize)]| {
        let data_parallel: usize = mesh.iter().filter(|(name, _)| name.starts_with("data")).map(|(_, n)| n).product();
        let mut run = run("float32", 1, 1)
            .set("training.local_batch_size", 8 / data_parallel)
            .set("model.dim", 64)
            .set("model.n_kv_heads", 4)
            .set("model.ffn_dim", 128)
            .set("model.converters", "quantize.linear.mx")
            .set("quantize.linear.mx.recipe_name", "mxfp8_cublas");
        for (dimension, degree) in mesh {
            run = run.set(&format!("parallelism.{dimension}_degree"), degree);
        }
        run
    };
    let reference = mx(&[]).steps();
    assert_same("emulated", &mx(&[]).set("quantize.linear.mx.recipe_name", "mxfp8_emulated").steps(), &reference, 0.0);
    let without = mx(&[]).set("model.converters", "").steps();
    assert_ne!(reference[9].loss, without[9].loss, "eight bits show");
    for mesh in [&[(SHARD, 2)][..], &[(TENSOR, 2)], &[(SHARD, 2), (TENSOR, 2)]] {
        assert_same(&format!("{mesh:?}"), &mx(mesh).steps(), &reference, 1e-4);
    }
    let cut = mx(&[(TENSOR, 2)]).set("model.n_kv_heads", 2).error();
    assert!(cut.contains("layers.0.attention.wk.weight") && cut.contains("cuts blocks of 32"), "{cut}");
}

#[test]
fn delayed_scales_are_those_of_every_rank() {
    let delayed = |tensor: usize| {
        run("float32", 1, 1)
            .set("training.local_batch_size", 8)
            .set("model.converters", "quantize.linear.float8")
            .set("quantize.linear.float8.scaling", "delayed")
            .set("quantize.linear.float8.amax_history", 4)
            .set("parallelism.tensor_parallel_degree", tensor)
            .steps()
    };
    let reference = delayed(1);
    let dynamic = run("float32", 1, 1).set("model.converters", "float8").set("training.local_batch_size", 8).steps();
    assert_ne!(reference[9].loss, dynamic[9].loss, "the history shows");
    assert_same("2 ranks", &delayed(2), &reference, 1e-4);
}

#[test]
fn ways_of_working_change_nothing() {
    let reference = run("float64", 1, 1).steps();
    let ways: [(&str, &str, &str, usize); 9] = [
        ("fsdp_reshard_after_forward", "2", SHARD, 4),
        ("fsdp_reshard_after_forward", "never", SHARD, 2),
        ("fsdp_reshard_after_forward", "always", SHARD, 2),
        ("enable_sequence_parallel", "false", TENSOR, 2),
        ("disable_loss_parallel", "true", TENSOR, 2),
        ("enable_async_tensor_parallel", "true", TENSOR, 2),
        ("context_parallel_rotate_method", "alltoall", CONTEXT, 2),
        ("context_parallel_rotate_method", "ulysses", CONTEXT, 2),
        ("context_parallel_load_balancer", "documents", CONTEXT, 2),
    ];
    for (key, value, dimension, degree) in ways {
        let local = if dimension == SHARD { 8 / degree } else { 8 };
        let run = run("float64", 1, 1)
            .set("training.local_batch_size", local)
            .set(&format!("parallelism.{dimension}_degree"), degree)
            .set(&format!("parallelism.{key}"), value);
        assert_same(&format!("{key} = {value}"), &run.steps(), &reference, 1e-10);
    }
}

#[test]
fn mixed_precision_stays_near_single_precision() {
    let single = run("float32", 1, 1).steps();
    let mixed = run("float32", 2, 1).set("training.mixed_precision_param", "bfloat16").steps();
    for (mixed, single) in mixed.iter().zip(&single) {
        assert!((mixed.loss / single.loss - 1.0).abs() < 0.02, "{mixed:?} {single:?}");
    }
}
