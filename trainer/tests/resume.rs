//! Any run goes on from its checkpoint on any other mesh, on the very next batch, as if it had never stopped.
#![cfg(feature = "checkpoint")]
#![allow(clippy::unwrap_used)]

mod support;

use support::{Run, Step, read_steps};

/// A mesh, and what else changes with it.
type Mesh = &'static [(&'static str, &'static str)];

const SHARD: &str = "parallelism.data_parallel_shard_degree";
const REPLICATE: &str = "parallelism.data_parallel_replicate_degree";
const TENSOR: &str = "parallelism.tensor_parallel_degree";
const CONTEXT: &str = "parallelism.context_parallel_degree";
const PIPELINE: &str = "parallelism.pipeline_parallel_degree";
const SCHEDULE: &str = "parallelism.pipeline_parallel_schedule";
const RESHARD: &str = "parallelism.fsdp_reshard_after_forward";

const ONE: Mesh = &[];
const TWO_SHARDS: Mesh = &[(SHARD, "2")];

/// Sequences of a step: what every mesh here divides.
const BATCH: usize = 24;

/// A run of twenty steps in all, of which `steps` are taken, with a checkpoint every five.
fn run() -> Run {
    Run::new()
        .set("training.dtype", "float64")
        .set("training.mixed_precision_param", "float64")
        .set("training.mixed_precision_reduce", "float64")
        .set("training.global_batch_size", BATCH)
        .set("model.n_layers", 6)
        .set("lr_scheduler.total_steps", 20)
        .set("lr_scheduler.decay_ratio", 0.5)
        .set("checkpoint.enable", "true")
        .set("checkpoint.interval", 5)
        .set("checkpoint.last_save_model_only", "false")
}

/// Goes on with a run on a mesh, up to a step. What an earlier mesh had set is undone.
fn on(run: Run, mesh: Mesh, steps: u64) -> Run {
    let mut data_parallel = 1;
    let mut run = run.set(SCHEDULE, "1F1B").set(RESHARD, "default");
    for dimension in [SHARD, REPLICATE, TENSOR, CONTEXT, PIPELINE] {
        let degree = mesh.iter().find(|(key, _)| *key == dimension).map_or("1", |(_, degree)| degree);
        if [SHARD, REPLICATE].contains(&dimension) {
            data_parallel *= degree.parse::<usize>().unwrap();
        }
        run = run.set(dimension, degree);
    }
    run = run.set("training.local_batch_size", BATCH / data_parallel).set("training.steps", steps);
    mesh.iter().fold(run, |run, (key, value)| run.set(key, value))
}

/// Every loss and norm of some steps of a run that was never stopped.
fn assert_same(name: &str, ours: &[Step], reference: &[Step], tolerance: f64) {
    let numbers: Vec<u64> = ours.iter().map(|step| step.step).collect();
    assert!(!ours.is_empty(), "{name}");
    for ours in ours {
        let reference = &reference[ours.step as usize - 1];
        assert_eq!(ours.step, reference.step);
        let off = |a: f64, b: f64| (a - b).abs() / b.abs();
        let worst = off(ours.loss, reference.loss).max(off(ours.grad_norm, reference.grad_norm));
        assert!(
            worst <= tolerance,
            "{name}, step {} of {numbers:?}: off by {worst:e}: {ours:?} {reference:?}",
            ours.step
        );
    }
}

/// Seven steps on one mesh, seven on the next, six on a third: a run that is resumed twice.
fn assert_resumes(name: &str, reference: &[Step], meshes: [Mesh; 3]) {
    let mut run = run();
    let mut taken = 0;
    for (mesh, steps) in meshes.into_iter().zip([7, 14, 20]) {
        run = on(run, mesh, steps);
        let ours = run.steps();
        assert_eq!(ours.first().map(|step| step.step), Some(taken + 1), "{name}: {mesh:?} goes on at the wrong step");
        assert_eq!(ours.last().map(|step| step.step), Some(steps), "{name}: {mesh:?}");
        assert_same(&format!("{name}: {mesh:?}"), &ours, reference, 1e-10);
        taken = steps;
    }
}

#[test]
fn on_other_meshes_twice_in_a_row() {
    let reference = on(run(), ONE, 20).steps();
    let journeys: [[Mesh; 3]; 8] = [
        [ONE, TWO_SHARDS, ONE],
        [&[(SHARD, "3")], &[(TENSOR, "2")], &[(REPLICATE, "2"), (SHARD, "2")]],
        [&[(PIPELINE, "2")], &[(PIPELINE, "2"), (SCHEDULE, "ZBVZeroBubble")], &[(SHARD, "4"), (RESHARD, "never")]],
        [&[(TENSOR, "4")], &[(PIPELINE, "2"), (SCHEDULE, "Interleaved1F1B")], &[(CONTEXT, "3")]],
        [&[(CONTEXT, "2"), (TENSOR, "2")], &[(PIPELINE, "3"), (SHARD, "2")], &[(SHARD, "3"), (TENSOR, "2")]],
        [&[(REPLICATE, "4")], &[(SHARD, "4"), (RESHARD, "2")], &[(PIPELINE, "2"), (TENSOR, "2")]],
        [&[(PIPELINE, "2"), (SHARD, "2"), (CONTEXT, "2"), (TENSOR, "2")], ONE, &[(PIPELINE, "4")]],
        [ONE, &[(PIPELINE, "2"), (SHARD, "2"), (CONTEXT, "2"), (TENSOR, "2")], &[(SHARD, "8")]],
    ];
    for (number, meshes) in journeys.into_iter().enumerate() {
        assert_resumes(&format!("journey {number}"), &reference, meshes);
    }
}

#[test]
fn on_the_same_mesh_to_the_bit() {
    for mesh in [ONE, &[(SHARD, "2"), (TENSOR, "2")], &[(PIPELINE, "2"), (SHARD, "2")]] as [Mesh; 3] {
        let straight = on(run(), mesh, 12).steps();
        let first = on(run().set("checkpoint.async_mode", "async"), mesh, 5);
        first.steps();
        let rest = on(first, mesh, 12).steps();
        assert_eq!(rest.len(), 7, "{mesh:?}");
        assert_same(&format!("{mesh:?}"), &rest, &straight, 0.0);
    }
}

#[test]
fn by_processes() {
    let reference = on(run(), ONE, 9).steps();
    let process = |run: Run, backend: &str| run.set("comm.backend", backend);
    let first = process(on(run(), &[(SHARD, "2"), (PIPELINE, "2")], 4), "processes");
    assert_same("processes", &first.steps(), &reference, 1e-10);
    let second = process(on(first, &[(TENSOR, "2")], 7), "threads");
    assert_same("threads", &second.steps(), &reference, 1e-10);
    let third = process(on(second, &[(CONTEXT, "2")], 9), "processes");
    assert_same("processes again", &third.steps(), &reference, 1e-10);
}

#[test]
fn with_tied_embeddings() {
    let tied = || run().set("model.tie_embeddings", "true");
    let reference = on(tied(), ONE, 12).steps();
    let first = on(tied(), &[(PIPELINE, "2")], 4);
    first.steps();
    let second = on(first, &[(TENSOR, "2"), (SHARD, "2")], 8);
    assert_same("shards", &second.steps(), &reference, 1e-10);
    assert_same("stages", &on(second, &[(PIPELINE, "3")], 12).steps(), &reference, 1e-10);
}

#[test]
fn without_parts_of_it() {
    let run = run();
    let reference = on(run, ONE, 10);
    let straight = reference.steps();
    // The optimizer starts anew: the step after the next differs, the next has the same loss.
    let without = reference.set("checkpoint.exclude_from_loading", "optimizer").set("checkpoint.load_only", "true");
    let without = on(without.set("checkpoint.load_step", 5), ONE, 10);
    let steps = without.steps();
    assert_eq!(steps[0].step, 6);
    assert_same("the first", &steps[..1], &straight, 0.0);
    assert_ne!(steps[1].loss, straight[6].loss);
    // The data starts anew.
    let without = without.set("checkpoint.exclude_from_loading", "dataloader,lr_scheduler");
    assert_ne!(without.steps()[0].loss, straight[5].loss);
    // Nothing is excluded: the same step as in the run itself.
    let whole = without.set("checkpoint.exclude_from_loading", "");
    assert_same("the whole", &whole.steps(), &straight, 0.0);
    assert_eq!(read_steps(&whole.path("out/metrics.jsonl")).len(), 5);
}

/// Runs `ferrotitan checkpoint …` to its end.
fn checkpoint(words: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferrotitan"));
    command.arg("checkpoint").args(words).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let output = support::finish(command.spawn().unwrap(), std::time::Duration::from_secs(60));
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(said).unwrap())
}

#[test]
fn through_hugging_face_and_back() {
    let run = run().set("checkpoint.folder", "first");
    let first = on(run, &[(PIPELINE, "2"), (TENSOR, "2")], 5);
    first.steps();
    // The last checkpoint as a Hugging Face model, from a mesh whose ranks hold parts of every tensor.
    let exported = first.set("checkpoint.last_save_model_only", "true").set("checkpoint.last_save_in_hf", "true");
    let exported = on(exported.set("checkpoint.export_dtype", "float32"), &[(SHARD, "2"), (TENSOR, "2")], 7);
    let trained = exported.steps();
    let address = |name: &str| exported.path("out").join(name).to_str().unwrap().to_owned();
    let (native, model) = (address("first/step-5"), address("first/step-7-hf"));
    assert!(!exported.path("out/first/step-7-shards").exists());

    let (code, said) = checkpoint(&["inspect", &model]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("layers.5.attention.wq.weight") && said.contains("Hugging Face"), "{said}");
    let (code, said) = checkpoint(&["verify", &native]);
    assert_eq!((code, said.contains("sound")), (Some(0), true), "{said}");
    let (code, said) = checkpoint(&["verify", &model]);
    assert_eq!((code, said.contains("every tensor can be read")), (Some(0), true), "{said}");
    // To another format and back: nothing is lost.
    let (there, back) = (address("there"), address("back"));
    for (from, to, format) in [(&model, &there, "native"), (&there, &back, "hf")] {
        let (code, said) = checkpoint(&["convert", from, to, "--format", format]);
        assert_eq!(code, Some(0), "{said}");
    }
    let (code, said) = checkpoint(&["diff", &model, &back]);
    assert_eq!((code, said.contains("the same")), (Some(0), true), "{said}");
    let (code, said) = checkpoint(&["diff", &model, &native]);
    assert_eq!((code, said.contains("elements differ")), (Some(1), true), "{said}");
    assert!(said.contains("optimizer.exp_avg.norm.weight: only in the second"), "{said}");

    // A run that starts from each of the two begins alike, with another first loss than an untrained model's.
    let from = |path: &str, run: Run| {
        let run = run.set("checkpoint.folder", "another").set("checkpoint.initial_load_path", path);
        on(run.set("checkpoint.load_only", "true"), &[(CONTEXT, "2")], 2)
    };
    let started = from(&model, exported);
    let loss = started.steps()[0].loss;
    let again = from(&there, started);
    assert_eq!(again.steps()[0].loss, loss);
    assert!(loss < trained[0].loss + 0.1, "{loss} {trained:?}");
}

#[test]
fn mistakes_are_said() {
    let run = on(run(), ONE, 5);
    run.steps();
    let contains = |said: &str, words: &[&str]| {
        words.iter().for_each(|word| assert!(said.contains(word), "{word:?} is missing in:\n{said}"));
    };
    // A step that is not there.
    let run = run.set("checkpoint.load_step", 4);
    contains(&run.error(), &["step 4", "[5]"]);
    // Another model.
    let run = on(run.set("checkpoint.load_step", -1).set("model.ffn_dim", 64), TWO_SHARDS, 8);
    contains(&run.error(), &["layers.0.feed_forward.w1.weight", "[48, 32]", "[64, 32]"]);
    // Another model whose tensors are as large.
    let run = run.set("model.ffn_dim", 48).set("model.n_heads", 8).set("model.n_kv_heads", 4);
    contains(&run.error(), &["heads 4", "8"]);
    let run = run.set("model.n_heads", 4).set("model.n_kv_heads", 2).set("model.n_layers", 5);
    contains(&run.error(), &["blocks 6", "5"]);
    let run = run.set("model.n_layers", 6);
    // Another dtype.
    let run = run.set("model.ffn_dim", 48).set("training.dtype", "float32");
    let run = run.set("training.mixed_precision_param", "float32").set("training.mixed_precision_reduce", "float32");
    contains(&run.error(), &["F64", "F32"]);
    // Later steps than the one to go on from.
    let run = run.set("training.dtype", "float64").set("training.mixed_precision_param", "float64");
    let run = run.set("training.mixed_precision_reduce", "float64").set("checkpoint.last_save_model_only", "true");
    let run = on(run, ONE, 8);
    assert_eq!(run.steps()[0].step, 6);
    let run = run.set("checkpoint.load_step", 5);
    contains(&run.error(), &["step 8", "step 5", "checkpoint.folder"]);
    // The model alone.
    let run = on(run.set("checkpoint.load_step", -1), ONE, 10);
    contains(&run.error(), &["last_save_model_only", "exclude_from_loading"]);
    // A damaged byte.
    let folder = run.path("out/checkpoint/step-5");
    let attempt = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).find(|path| path.is_dir());
    let is_data = |path: &std::path::PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let file = std::fs::read_dir(attempt.unwrap()).unwrap().map(|entry| entry.unwrap().path()).find(is_data).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let run = run.set("checkpoint.load_step", 5).set("checkpoint.load_only", "true");
    contains(&run.error(), &["checksum", file.file_name().unwrap().to_str().unwrap(), "tensor"]);
    let (code, said) = checkpoint(&["verify", folder.to_str().unwrap()]);
    assert_eq!(code, Some(1));
    contains(&said, &["checksum"]);
}
