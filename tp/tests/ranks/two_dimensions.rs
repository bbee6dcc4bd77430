//! Together with fully sharded data parallelism: each parameter is divided by tensor parallelism first, then sharded.

use ferrotitan_comm::{ReduceOp, threads};
use ferrotitan_fsdp::Fsdp;
use ferrotitan_mesh::{Degrees, Layout, Mesh, Parts, View};
use ferrotitan_nn::Batch;
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_tp::Options;

use crate::support::{HOW, Outcome, assert_parity, batch, checkpoint_blocks, config, divided, limits, single};

/// The rows of a batch that a data-parallel rank reads.
fn rows(batch: &Batch, index: usize, count: usize) -> Batch {
    let length = batch.tokens.size()[0] / count as i64;
    let cut = |t: &tch::Tensor| t.narrow(0, index as i64 * length, length);
    Batch::new(cut(&batch.tokens), batch.labels.as_ref().map(cut)).unwrap()
}

fn sharded(config: &LlamaConfig, degrees: Degrees, options: Options, checkpoint: bool) -> Vec<Outcome> {
    let body = |mesh: ferrotitan_comm::DeviceMesh| {
        let mut model = divided(config, &mesh, options)?;
        if checkpoint {
            checkpoint_blocks(&mut model);
        }
        let handle = Fsdp::new(&mesh, ferrotitan_fsdp::Options::default()).attach(&mut model).unwrap();
        model.materialize(&HOW, &mesh)?;
        let whole = batch(8, 7, config.vocab_size as i64);
        let own = rows(&whole, mesh.index(View::BATCH), mesh.size(View::BATCH));
        let loss = model.forward(&own)?;
        (&loss * 0.125).backward();
        handle.finish_backward().unwrap();
        let loss = mesh.group(View::LOSS).unwrap().all_reduce_scalar(loss.double_value(&[]), ReduceOp::Sum).unwrap();
        let gradients = model.parameters().into_iter().map(|parameter| {
            let gradient = parameter.gradient().unwrap().unwrap();
            (parameter.name().to_owned(), parameter.layout().local_region(&mesh), gradient.copy())
        });
        Ok::<_, ferrotitan_nn::Error>(Outcome { loss, gradients: gradients.collect() })
    };
    threads::run(degrees, &limits(), body).unwrap()
}

#[test]
fn two_by_four_and_four_by_two() {
    for tied_embeddings in [false, true] {
        let config = LlamaConfig { tied_embeddings, ..config(8, 2, 27, 37) };
        let expected = single(&config, &batch(8, 7, 37));
        let one = Degrees::default();
        for degrees in [
            Degrees { dp_shard: 2, tp: 4, ..one },
            Degrees { dp_shard: 4, tp: 2, ..one },
            Degrees { dp_replicate: 2, dp_shard: 2, tp: 2, ..one },
        ] {
            for sequence_parallel in [true, false] {
                let options = Options { sequence_parallel, async_tp: tied_embeddings, ..Options::default() };
                assert_parity(&expected, &sharded(&config, degrees, options, sequence_parallel));
            }
        }
    }
}

#[test]
fn layouts_are_what_both_say() {
    let config = config(8, 2, 27, 37);
    let degrees = Degrees { dp_shard: 2, tp: 4, ..Degrees::default() };
    let layouts = threads::run(degrees, &limits(), |mesh| {
        let mut model = divided(&config, &mesh, Options::default())?;
        Fsdp::new(&mesh, ferrotitan_fsdp::Options::default()).attach(&mut model).unwrap();
        let named = model.parameters().into_iter().map(|p| (p.name().to_owned(), p.layout()));
        Ok::<_, ferrotitan_nn::Error>(named.collect::<Vec<_>>())
    });
    let head = 4;
    let at = |ranges: [std::ops::Range<usize>; 4]| Parts::At(ranges.map(|r| r.start * head..r.end * head).to_vec());
    let (queries, keys) = (at([0..2, 2..4, 4..6, 6..8]), at([0..1, 0..1, 1..2, 1..2]));
    let whole = build(&config).unwrap().parameters();
    for layouts in layouts.unwrap() {
        assert_eq!(layouts.len(), whole.len());
        for ((name, layout), parameter) in layouts.iter().zip(&whole) {
            let split = |axis, parts| Layout::shard(parameter.layout(), View::TP, axis, parts).unwrap();
            let divided = match name.rsplit('.').nth(1).unwrap() {
                "wq" => split(0, queries.clone()),
                "wk" | "wv" => split(0, keys.clone()),
                "wo" => split(1, queries.clone()),
                "w1" | "w3" | "tok_embeddings" | "output" => split(0, Parts::Even),
                "w2" => split(1, Parts::Even),
                _ => parameter.layout(),
            };
            assert_eq!(*layout, divided.shard(View::FSDP, 0, Parts::Even).unwrap(), "{name}");
        }
    }
}
