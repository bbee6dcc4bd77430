//! What travels between the ranks, and when.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::support::{HOW, batch, config, divided, on_ranks};
use ferrotitan_comm::{Event, Op};
use ferrotitan_nn::llama::LlamaConfig;
use ferrotitan_nn::{Gemm, Model, Native, Result, Seam};
use ferrotitan_tp::Options;
use tch::Tensor;

/// The events of one rank's forward and backward pass.
fn traffic(config: &LlamaConfig, tp: usize, options: Options) -> [Vec<Event>; 2] {
    let ranks = on_ranks(tp, |mesh| {
        let mut model = divided(config, &mesh, options).unwrap();
        model.materialize(&HOW, &mesh).unwrap();
        let start = mesh.recorder().mark();
        let loss = model.forward(&batch(2, 12, config.vocab_size as i64)).unwrap();
        let middle = mesh.recorder().mark();
        loss.backward();
        let forward = mesh.recorder().since(start).len() - mesh.recorder().since(middle).len();
        let mut events = mesh.recorder().since(start);
        let backward = events.split_off(forward);
        [events, backward]
    });
    ranks.into_iter().next().unwrap()
}

/// How often each operation ran for each block: the difference that one more block makes.
fn per_block(config: &LlamaConfig, options: Options) -> [[usize; 3]; 2] {
    let count = |n_layers| {
        let traffic = traffic(&LlamaConfig { n_layers, ..config.clone() }, 2, options);
        traffic.map(|events| {
            assert!(events.iter().all(|event| &*event.group == "tp"));
            [Op::AllGather, Op::ReduceScatter, Op::AllReduce].map(|op| events.iter().filter(|e| e.op == op).count())
        })
    };
    let (two, three) = (count(2), count(3));
    std::array::from_fn(|pass| std::array::from_fn(|op| three[pass][op] - two[pass][op]))
}

#[test]
fn collectives_of_a_block() {
    let config = config(8, 4, 24, 32);
    // Backward, the two gathered inputs are gathered again, and the two norms' gradients are summed.
    let sequence = per_block(&config, Options::default());
    assert_eq!(sequence, [[2, 2, 0], [2 + 2, 2, 2]]);
    let whole = per_block(&config, Options { sequence_parallel: false, ..Options::default() });
    assert_eq!(whole, [[0, 0, 2], [0, 0, 2]]);
    // Each crossing in four pieces, but for the gathers and sums that travel under other products anyway.
    let pieces = per_block(&config, Options { async_tp: true, ..Options::default() });
    assert_eq!(pieces, [[8, 8, 0], [8 + 2, 2, 2]]);
}

#[test]
fn the_loss_sends_three_numbers_a_token() {
    let config = config(8, 8, 24, 61);
    let [forward, backward] = traffic(&config, 4, Options::default());
    let sums: Vec<_> = forward.iter().filter(|event| event.op == Op::AllReduce).collect();
    assert_eq!(sums.iter().map(|event| event.shape.clone()).collect::<Vec<_>>(), [[24], [24], [24]]);
    // Backward of the head: one sum of the hidden states' gradient. The all-reduces are those of the five norms.
    let norms = backward.iter().filter(|event| event.op == Op::AllReduce);
    assert!(norms.clone().all(|event| event.shape == [config.dim as i64]));
    assert_eq!(norms.count(), 5);
}

/// Remembers the largest operand or result of any product, and when each product ran.
#[derive(Debug, Default)]
struct Watched {
    largest: Mutex<usize>,
    spans: Mutex<Vec<(Instant, Instant)>>,
}

impl Watched {
    fn run(&self, product: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let start = Instant::now();
        let product = product()?;
        self.spans.lock().unwrap().push((start, Instant::now()));
        let mut largest = self.largest.lock().unwrap();
        *largest = (*largest).max(product.numel());
        Ok(product)
    }
}

impl Gemm for Watched {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.run(|| Native.output(x, weight))
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.run(|| Native.input_gradient(dy, weight))
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
        self.run(|| Ok(Native.weight_gradient(dy, x, weight)?.unwrap())).map(Some)
    }
}

fn watch(model: &mut Model, name: &str, gemm: &Arc<Watched>) {
    for (seam_name, seam) in model.seams() {
        if let (true, Seam::Linear(linear)) = (seam_name == name, seam) {
            linear.projections_mut()[0].gemm = gemm.clone();
        }
    }
}

#[test]
fn no_rank_holds_more_than_its_share_of_the_logits() {
    // Many tokens and a large vocabulary beside a narrow model: logits are by far the largest tensors.
    let config = config(4, 4, 16, 4001);
    let (tokens, tp) = (2 * 200, 4);
    on_ranks(tp, |mesh| {
        let mut model = divided(&config, &mesh, Options::default()).unwrap();
        let watched = Arc::new(Watched::default());
        watch(&mut model, "output", &watched);
        model.materialize(&HOW, &mesh).unwrap();
        model.forward(&batch(2, 200, 4001)).unwrap().backward();
        let share = tokens * 4001_usize.div_ceil(tp);
        let product = *watched.largest.lock().unwrap();
        assert!(product > share / 2 && product <= share, "{product} of {share}");
        let message = mesh.recorder().events().iter().map(|event| event.shape.iter().product::<i64>()).max();
        assert!(message.unwrap() as usize <= share);
    });
}

/// Each piece but the last is multiplied while its neighbour travels: started before the product, waited for after it.
#[test]
fn pieces_travel_while_others_are_multiplied() {
    let config = LlamaConfig { n_layers: 1, ..config(8, 8, 24, 32) };
    for (linear, op, backward) in [
        ("layers.0.attention.wqkv", Op::AllGather, false),
        ("layers.0.attention.wo", Op::ReduceScatter, false),
        ("layers.0.attention.wo", Op::AllGather, true),
    ] {
        on_ranks(2, |mesh| {
            let mut model = divided(&config, &mesh, Options { async_tp: true, ..Options::default() }).unwrap();
            let watched = Arc::new(Watched::default());
            watch(&mut model, linear, &watched);
            model.materialize(&HOW, &mesh).unwrap();
            let mut start = mesh.recorder().mark();
            let loss = model.forward(&batch(2, 16, 32)).unwrap();
            if backward {
                watched.spans.lock().unwrap().clear();
                start = mesh.recorder().mark();
                loss.backward();
            }
            let spans = watched.spans.lock().unwrap();
            let events = mesh.recorder().since(start);
            let under = |(begun, ended): &(Instant, Instant)| {
                let travels = |e: &&Event| e.op == op && e.issued <= *begun && e.waited.unwrap() >= *ended;
                events.iter().filter(travels).count()
            };
            let overlaps: Vec<usize> = spans.iter().take(4).map(under).collect();
            // A gather is ahead of the first three products, a scatter behind the last three.
            let expected = if op == Op::AllGather { [1, 1, 1, 0] } else { [0, 1, 1, 1] };
            assert_eq!(overlaps, expected, "{linear}, backward {backward}");
        });
    }
}
