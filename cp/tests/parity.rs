//! Attention over ranks against dense attention in double precision.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use ferrotitan_comm::threads::{Options, run};
use ferrotitan_comm::{Group, Op};
use ferrotitan_cp::{Balance, Mask, Method, Sharding, attention};
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::Documents;
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const HEAD: i64 = 4;

/// One case: what is attended to, and by how many ranks.
#[derive(Debug, Clone)]
struct Case {
    ranks: usize,
    batch: i64,
    seq: i64,
    kv_heads: i64,
    group: i64,
    mask: Mask,
    balance: Balance,
    seed: i64,
}

/// Queries, keys, values, and the gradient of the output, of the whole sequence.
type Inputs = [Tensor; 4];

impl Case {
    fn inputs(&self, kind: Kind) -> Inputs {
        tch::manual_seed(self.seed);
        let random =
            |heads| Tensor::randn([self.batch, self.seq, heads, HEAD], (Kind::Double, Device::Cpu)).to_kind(kind);
        let heads = self.kv_heads * self.group;
        [random(heads), random(self.kv_heads), random(self.kv_heads), random(heads)]
    }

    /// Which query sees which key: `[batch, 1, 1, seq, seq]`.
    fn visible(&self) -> Tensor {
        let seq = self.seq;
        let lengths = self.mask.documents().map(|documents| documents.lengths().to_vec());
        let ids = lengths.unwrap_or(vec![vec![seq]; self.batch as usize]).into_iter().map(|row| {
            let ids = row.into_iter().enumerate().flat_map(|(id, n)| std::iter::repeat_n(id as i64, n as usize));
            Tensor::from_slice(&ids.collect::<Vec<_>>())
        });
        let ids = Tensor::stack(&ids.collect::<Vec<_>>(), 0);
        let same = ids.unsqueeze(-1).eq_tensor(&ids.unsqueeze(-2)).reshape([self.batch, 1, 1, seq, seq]);
        let past = Tensor::ones([seq, seq], (Kind::Bool, Device::Cpu)).tril(0);
        if self.mask.is_causal() { same.logical_and(&past) } else { same }
    }

    /// Output and the three gradients by the definition, all scores at once.
    fn dense(&self, inputs: &Inputs) -> Vec<Tensor> {
        let leaf = |x: &Tensor| x.to_kind(Kind::Double).detach().set_requires_grad(true);
        let (q, k, v) = (leaf(&inputs[0]), leaf(&inputs[1]), leaf(&inputs[2]));
        let grouped =
            |x: &Tensor, n| x.reshape([self.batch, self.seq, self.kv_heads, n, HEAD]).permute([0, 2, 3, 1, 4]);
        let scores = grouped(&q, self.group).matmul(&grouped(&k, 1).transpose(-1, -2)) / (HEAD as f64).sqrt();
        let weights = scores.masked_fill(&self.visible().logical_not(), f64::NEG_INFINITY).softmax(-1, Kind::Double);
        let out = weights.matmul(&grouped(&v, 1)).permute([0, 3, 1, 2, 4]).reshape(q.size());
        let (q, k, v) = gradients(&out, [q, k, v], &inputs[3].to_kind(Kind::Double));
        vec![out.detach(), q, k, v]
    }

    /// The same by ranks, in the order of the sequence.
    fn parallel(&self, inputs: &Inputs, method: Method) -> Vec<Tensor> {
        let degrees = Degrees { cp: self.ranks, ..Degrees::default() };
        let options = Options { timeout: Duration::from_secs(30), ..Options::default() };
        let inputs = inputs.each_ref().map(Tensor::shallow_clone).map(std::sync::Mutex::new);
        let ranks = run(degrees, &options, |mesh| -> ferrotitan_cp::Result<_> {
            let group = mesh.group(View::CP)?;
            let inputs = inputs.each_ref().map(|x| x.lock().unwrap().copy());
            self.on_rank(&inputs, method, &group)
        });
        ranks.unwrap().swap_remove(0)
    }

    fn on_rank(&self, inputs: &Inputs, method: Method, group: &Group) -> ferrotitan_cp::Result<Vec<Tensor>> {
        let sharding = self.balance.sharding(&self.mask, self.batch as usize, self.seq as usize, group.size())?;
        let cut = |x: &Tensor| sharding.shard(x, 1, group.rank(), 0);
        let leaf = |x: &Tensor| Ok::<_, ferrotitan_cp::Error>(cut(x)?.detach().set_requires_grad(true));
        let (q, k, v) = (leaf(&inputs[0])?, leaf(&inputs[1])?, leaf(&inputs[2])?);
        let out = attention(&q, &k, &v, &self.mask, &sharding, method, group)?;
        let (dq, dk, dv) = gradients(&out, [q, k, v], &cut(&inputs[3])?);
        [out, dq, dk, dv].iter().map(|x| sharding.gather(&x.detach(), 1, group)).collect()
    }
}

fn gradients(out: &Tensor, inputs: [Tensor; 3], grad: &Tensor) -> (Tensor, Tensor, Tensor) {
    (out * grad).sum(out.kind()).backward();
    let [q, k, v] = inputs.map(|x| x.grad());
    (q, k, v)
}

fn assert_close(found: &[Tensor], expected: &[Tensor], tolerance: f64, what: &str) {
    for ((found, expected), name) in found.iter().zip(expected).zip(["output", "dq", "dk", "dv"]) {
        assert_eq!(found.size(), expected.size(), "{what}: {name}");
        let scale = expected.abs().max().double_value(&[]).max(1.0);
        let difference = (found - expected).abs().max().double_value(&[]) / scale;
        assert!(difference <= tolerance, "{what}: {name} is off by {difference:e}");
    }
}

/// Lengths that fill a sequence, many of them 1.
fn lengths(seq: i64) -> impl Strategy<Value = Vec<i64>> {
    let length = prop_oneof![Just(1_i64), 1..=seq.max(1), Just(seq)];
    prop::collection::vec(length, seq as usize).prop_map(move |lengths| {
        let mut left = seq;
        let cut = lengths.into_iter().map(|length| {
            let length = length.min(left);
            left -= length;
            length
        });
        cut.filter(|&length| length > 0).collect()
    })
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (prop::sample::select(vec![1usize, 2, 3, 4, 8]), 1i64..=2, 1i64..=40, 1i64..=4, 1i64..=3);
    let balance = prop::sample::select(vec![Balance::HeadTail, Balance::Contiguous, Balance::Documents]);
    sizes.prop_flat_map(move |(ranks, batch, seq, kv_heads, group)| {
        let documents = prop::option::weighted(0.7, prop::collection::vec(lengths(seq), batch as usize));
        (any::<bool>(), documents, balance.clone(), any::<u16>()).prop_map(move |(causal, documents, balance, seed)| {
            let mask = if causal { Mask::causal() } else { Mask::full() };
            let mask = match documents {
                Some(lengths) => mask.within(Documents::from_lengths(lengths).unwrap()),
                None => mask,
            };
            Case { ranks, batch, seq, kv_heads, group, mask, balance, seed: i64::from(seed) }
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn equals_dense_attention(case in cases()) {
        let inputs = case.inputs(Kind::Double);
        let dense = case.dense(&inputs);
        let found = Method::ALL.map(|method| case.parallel(&inputs, method));
        for (method, found) in Method::ALL.iter().zip(&found) {
            assert_close(found, &dense, 1e-12, &format!("{method} {case:?}"));
        }
        // Ring and all-gather meet the same blocks in the same order.
        for (ring, gathered) in found[0].iter().zip(&found[1]).take(2) {
            prop_assert_eq!(ring, gathered);
        }
    }
}

fn case(ranks: usize, seq: i64, mask: Mask) -> Case {
    Case { ranks, batch: 1, seq, kv_heads: 2, group: 2, mask, balance: Balance::HeadTail, seed: 7 }
}

#[test]
fn long_sequences_cross_the_kernels_tiles() {
    let documents = Documents::from_lengths(vec![vec![1, 700, 1, 1, 397]]).unwrap();
    for mask in [Mask::causal(), Mask::full(), Mask::causal().within(documents)] {
        let case = case(2, 1100, mask);
        let inputs = case.inputs(Kind::Double);
        let dense = case.dense(&inputs);
        for method in Method::ALL {
            assert_close(&case.parallel(&inputs, method), &dense, 1e-11, method.name());
        }
    }
}

#[test]
fn low_precision_is_merged_in_single() {
    let case = case(4, 256, Mask::causal());
    for (kind, factor) in [(Kind::Float, 4.0), (Kind::BFloat16, 2.0)] {
        let inputs = case.inputs(kind);
        let dense = case.dense(&inputs);
        let error = |found: &[Tensor]| {
            let off = |(a, b): (&Tensor, &Tensor)| (a.to_kind(Kind::Double) - b).abs().max().double_value(&[]);
            found.iter().zip(&dense).map(off).fold(0.0, f64::max)
        };
        let alone = error(&Case { ranks: 1, ..case.clone() }.parallel(&inputs, Method::Ring));
        assert!(alone > 0.0);
        for method in Method::ALL {
            let found = case.parallel(&inputs, method);
            assert!(found.iter().all(|x| x.kind() == kind));
            let spread = error(&found);
            assert!(spread <= factor * alone, "{method} in {kind:?}: off by {spread:e}, one rank by {alone:e}");
        }
    }
}

#[test]
fn what_travels() {
    let case = Case { kv_heads: 1, group: 4, ..case(4, 64, Mask::causal()) };
    let inputs = case.inputs(Kind::Float);
    // Of one rank: 16 tokens of one key-value head, keys and values.
    let kv_bytes = 16 * HEAD as u64 * 2 * 4;
    for method in Method::ALL {
        let inputs = inputs.each_ref().map(Tensor::copy).map(std::sync::Mutex::new);
        let degrees = Degrees { cp: case.ranks, ..Degrees::default() };
        let totals = run(degrees, &Options::default(), |mesh| -> ferrotitan_cp::Result<_> {
            let group = mesh.group(View::CP)?;
            let inputs = inputs.each_ref().map(|x| x.lock().unwrap().copy());
            let sharding = Sharding::head_tail(64, 4)?;
            let leaf = |x: &Tensor| sharding.shard(x, 1, group.rank(), 0).unwrap().set_requires_grad(true);
            let (q, k, v) = (leaf(&inputs[0]), leaf(&inputs[1]), leaf(&inputs[2]));
            let out = attention(&q, &k, &v, &case.mask, &sharding, method, &group)?;
            out.sum(Kind::Float).backward();
            let recorder = group.recorder();
            assert!(recorder.events().iter().all(|event| event.finished.is_some()));
            Ok(Op::ALL
                .map(|op| (op, recorder.total("cp", op)))
                .into_iter()
                .filter(|(_, t)| t.count > 0)
                .collect::<Vec<_>>())
        });
        for totals in totals.unwrap() {
            let count = |op| totals.iter().find(|(o, _)| *o == op).map_or((0, 0), |(_, t)| (t.count, t.bytes));
            match method {
                // Three hops forward; backward three of the keys and values, and four of their gradients.
                Method::Ring => {
                    assert_eq!(count(Op::Send), (10, 10 * kv_bytes));
                    assert_eq!(count(Op::Recv), (10, 0));
                    assert_eq!(totals.len(), 2);
                }
                // Keys and values twice, their gradients once: each 3/4 of the whole.
                Method::AllGather => {
                    assert_eq!(count(Op::AllGather), (2, 2 * 3 * kv_bytes));
                    assert_eq!(count(Op::ReduceScatter), (1, 3 * kv_bytes));
                    assert_eq!(totals.len(), 2);
                }
                // One exchange there and one back, forward and backward.
                _ => {
                    assert_eq!(count(Op::AllToAll).0, 4);
                    assert_eq!(totals.len(), 1);
                }
            }
        }
    }
}

#[test]
fn the_next_block_is_on_its_way_while_this_one_is_computed() {
    let degrees = Degrees { cp: 4, ..Degrees::default() };
    run(degrees, &Options::default(), |mesh| -> ferrotitan_cp::Result<()> {
        let group = mesh.group(View::CP)?;
        let sharding = Sharding::head_tail(1024, 4)?;
        let x = Tensor::randn([1, 256, 2, 16], (Kind::Float, Device::Cpu));
        let mark = group.recorder().mark();
        let _ = attention(&x, &x, &x, &Mask::causal(), &sharding, Method::Ring, &group)?;
        let events = group.recorder().since(mark);
        assert_eq!(events.len(), 6);
        for event in events.iter().filter(|event| event.op == Op::Recv) {
            let (waited, finished) = (event.waited.unwrap(), event.finished.unwrap());
            // A block's attention lies between the issue and the wait.
            assert!(waited - event.issued > Duration::from_micros(20) && finished >= waited, "{event:?}");
        }
        Ok(())
    })
    .unwrap();
}
