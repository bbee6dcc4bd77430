//! What is communicated, in which order, in which dtype, and how much is gathered.
#![allow(clippy::unwrap_used)]

mod model;

use ferrotitan_fsdp::comm::{DeviceMesh, Event as Collective, Op, threads};
use ferrotitan_fsdp::nn::Materialize;
use ferrotitan_fsdp::nn::mesh::{Degrees, Dim, Mesh, View};
use ferrotitan_fsdp::tch::Kind;
use ferrotitan_fsdp::{Error, Event, Fsdp, Options, Reshard, Stats, What};
use model::{Training, batch, even, model, rank_options, train};

/// What one rank did in a step.
struct Step {
    collectives: Vec<Collective>,
    events: Vec<Event>,
    stats: Stats,
    /// Elements of each unit, in order.
    units: Vec<usize>,
    ranks: usize,
    replicas: usize,
}

impl Step {
    fn of(&self, group: &str, op: Op) -> Vec<&Collective> {
        self.collectives.iter().filter(|event| &*event.group == group && event.op == op).collect()
    }

    fn count(&self, group: &str, op: Op) -> usize {
        self.of(group, op).len()
    }

    fn bytes(&self, group: &str, op: Op) -> u64 {
        self.of(group, op).iter().map(|event| event.bytes).sum()
    }

    /// Where in the events something is for the first time after `from`.
    fn place(&self, from: usize, unit: usize, what: What) -> usize {
        let rest = &self.events[from..];
        let found = rest.iter().position(|event| (event.unit, event.what) == (unit, what));
        from + found.unwrap_or_else(|| panic!("no {what:?} of unit {unit} after {from} in {:?}", self.events))
    }
}

/// The second step of a training on every rank, by `rank`.
fn steps(degrees: Degrees, options: &Options, training: &Training) -> Vec<Step> {
    let ran = threads::run(degrees, &rank_options(), |mesh: DeviceMesh| {
        let mut model = model(training);
        let handle = Fsdp::new(&mesh, options.clone()).attach(&mut model)?;
        model.materialize(&training.how, &mesh).unwrap();
        let once = Training { steps: 1, ..training.clone() };
        train(&once, &mesh, &mut model, Some(&handle));
        let (mark, before) = (mesh.recorder().mark(), handle.stats());
        let _ = handle.take_events();
        train(&once, &mesh, &mut model, Some(&handle));
        let mut stats = handle.stats();
        stats.gathers -= before.gathers;
        stats.reductions -= before.reductions;
        let names: Vec<String> = (0..handle.units()).map(|unit| handle.name(unit).unwrap()).collect();
        let elements = |name: &String| {
            let layers = model.layers().iter().filter(|layer| name.split('+').any(|part| part == layer.name));
            let shapes = layers.flat_map(|layer| layer.layer.parameters()).map(|p| p.layout().shape().to_vec());
            shapes.map(|shape| shape.iter().product::<usize>()).sum()
        };
        Ok::<_, Error>(Step {
            collectives: mesh.recorder().since(mark),
            events: handle.take_events(),
            stats,
            units: names.iter().map(elements).collect(),
            ranks: mesh.size(View::FSDP),
            replicas: mesh.size(Dim::DpReplicate.into()),
        })
    });
    ran.unwrap()
}

fn shard(ranks: usize) -> Degrees {
    Degrees { dp_shard: ranks, ..Degrees::default() }
}

fn policy(reshard_after_forward: Reshard) -> Options {
    Options { reshard_after_forward, ..Options::default() }
}

/// Bytes that a rank sends of `elements` fp64 elements.
fn sent(elements: usize, ranks: usize) -> u64 {
    (elements * (ranks - 1) / ranks * 8) as u64
}

#[test]
fn each_strategy_gathers_and_reduces_as_often_as_it_says() {
    // Embedding, three blocks, norm and head.
    let (training, units) = (Training { layers: 3, ..Training::default() }, 5);
    let gathers = [
        (Reshard::Default, 2 * units - 1, 0),
        (Reshard::Always, 2 * units, 0),
        (Reshard::Never, units, 0),
        (Reshard::Ranks(1), units, 0),
        (Reshard::Ranks(2), units, units - 1),
    ];
    for (reshard, wide, narrow) in gathers {
        for step in steps(shard(4), &policy(reshard), &training) {
            assert_eq!(step.count("fsdp", Op::AllGather), wide, "{reshard:?}");
            assert_eq!(step.count("fsdp:2", Op::AllGather), narrow, "{reshard:?}");
            assert_eq!(step.count("fsdp", Op::ReduceScatter), units, "{reshard:?}");
            assert_eq!(step.stats.gathers as usize, wide + narrow);
            assert_eq!(step.stats.reductions as usize, units);
            assert_eq!(step.stats.gathered, 0);
            let others = [Op::AllGather, Op::ReduceScatter];
            // The norm and the loss are this test's own.
            let strange = step.collectives.iter().find(|event| !others.contains(&event.op) && event.shape != [1]);
            assert!(strange.is_none(), "{strange:?}");
        }
    }
}

#[test]
fn bytes_are_those_of_the_formulas() {
    let training = Training { vocabulary: 40, hidden: 24, ..Training::default() };
    for step in steps(shard(4), &Options::default(), &training) {
        let (all, last): (u64, u64) =
            (step.units.iter().map(|&n| sent(n, step.ranks)).sum(), sent(*step.units.last().unwrap(), step.ranks));
        assert_eq!(step.bytes("fsdp", Op::AllGather), 2 * all - last);
        assert_eq!(step.bytes("fsdp", Op::ReduceScatter), all);
    }
    let hybrid = Degrees { dp_shard: 2, dp_replicate: 2, ..Degrees::default() };
    for step in steps(hybrid, &policy(Reshard::Never), &training) {
        let all: u64 = step.units.iter().map(|&n| sent(n, step.ranks)).sum();
        let shards: u64 = step.units.iter().map(|&n| 2 * sent(n / step.ranks, step.replicas)).sum();
        assert_eq!(step.bytes("fsdp", Op::AllGather), all);
        assert_eq!(step.bytes("fsdp", Op::ReduceScatter), all);
        assert_eq!(step.bytes("dp_replicate", Op::AllReduce), shards);
    }
}

#[test]
fn replicas_alone_reduce_once_a_unit_and_gather_nothing() {
    let degrees = Degrees { dp_replicate: 3, ..Degrees::default() };
    for step in steps(degrees, &Options::default(), &Training::default()) {
        assert_eq!(step.count("dp_replicate", Op::AllReduce), step.units.len());
        assert_eq!(step.stats, Stats { reductions: step.units.len() as u64, ..Stats::default() });
        // While the backward of the unit before runs.
        let (last, before) = (step.units.len() - 1, step.units.len() - 2);
        let backward = step.place(0, before, What::Backward);
        assert!(step.place(0, last, What::ReduceStarted) < backward);
        assert!(step.place(0, last, What::Reduced) > backward);
    }
}

#[test]
fn one_rank_communicates_nothing() {
    for step in steps(Degrees::default(), &Options::default(), &Training::default()) {
        assert!(step.collectives.is_empty());
        assert_eq!(step.stats, Stats::default());
    }
}

#[test]
fn the_next_unit_is_on_its_way_while_one_computes() {
    let training = Training { layers: 4, ..Training::default() };
    for checkpoint in [false, true] {
        for step in steps(shard(2), &Options::default(), &Training { checkpoint, ..training.clone() }) {
            let last = step.units.len() - 1;
            assert_eq!(step.stats.peak, 2);
            let turn = step.place(0, last, What::Backward);
            for unit in 0..last {
                let forward = step.place(0, unit, What::Forward);
                let (started, arrived) =
                    (step.place(0, unit + 1, What::GatherStarted), step.place(0, unit + 1, What::Gathered));
                assert!(started < forward && forward < arrived && arrived < turn);
            }
            for unit in (1..=last).rev() {
                let backward = step.place(turn, unit, What::Backward);
                let (started, arrived) = (
                    step.place(forward_end(&step), unit - 1, What::GatherStarted),
                    step.place(turn, unit - 1, What::Gathered),
                );
                assert!(started < backward && backward < arrived);
                // The gradients of one unit leave while the next one computes, and are there when that is over.
                let next = step.place(turn, unit - 1, What::Backward);
                assert!(backward < step.place(turn, unit, What::ReduceStarted));
                assert!(
                    step.place(turn, unit, What::ReduceStarted) < next && next < step.place(turn, unit, What::Reduced)
                );
            }
        }
    }
}

/// Where the forward is over: the last unit has begun.
fn forward_end(step: &Step) -> usize {
    step.place(0, step.units.len() - 1, What::Forward)
}

#[test]
fn the_recorder_sees_the_overlap() {
    for step in steps(shard(2), &Options::default(), &Training { layers: 3, ..Training::default() }) {
        let gathers = step.of("fsdp", Op::AllGather);
        let computing: Vec<&Event> =
            step.events.iter().filter(|event| matches!(event.what, What::Forward | What::Backward)).collect();
        // All but the very first gather have some unit begin to compute between their start and the wait for them.
        for gather in &gathers[1..] {
            let flight = gather.issued..gather.waited.unwrap();
            assert!(computing.iter().any(|event| flight.contains(&event.at)));
        }
    }
}

#[test]
fn accumulation_without_communication_reduces_once() {
    for reduces_each in [false, true] {
        let training = Training { accumulation: 3, rows: 12, reduces_each, ..Training::default() };
        for step in steps(shard(2), &Options::default(), &training) {
            let units = step.units.len();
            assert_eq!(step.count("fsdp", Op::ReduceScatter), if reduces_each { 3 * units } else { units });
            assert_eq!(step.count("fsdp", Op::AllGather), 3 * (2 * units - 1));
        }
    }
}

#[test]
fn a_pipeline_gathers_and_reduces_its_stage_once() {
    let training = Training { rows: 8, ..Training::default() };
    let ran = threads::run(shard(2), &rank_options(), |mesh| {
        let mut model = model(&training);
        let handle = Fsdp::new(&mesh, Options::default()).attach(&mut model)?;
        model.materialize(&training.how, &mesh).unwrap();
        handle.set_requires_reduction(false);
        handle.unshard_all()?;
        let rows = |micro: usize| {
            let mine = even(8, mesh.index(View::LOSS), 2);
            mine.start + 2 * micro..mine.start + 2 * micro + 2
        };
        // Two forwards before the first backward.
        let losses: Vec<_> = (0..2).map(|micro| model.forward(&batch(&training, 0, rows(micro))).unwrap()).collect();
        losses.iter().for_each(|loss| loss.backward());
        handle.finish_backward()?;
        (0..handle.units()).try_for_each(|unit| handle.reduce(unit))?;
        assert_eq!(handle.stats().gathered, handle.units());
        handle.reshard_all()?;
        let units = handle.units() as u64;
        assert_eq!(handle.stats(), Stats { gathered: 0, peak: units as usize, gathers: units, reductions: units });
        let sums: Vec<f64> = model
            .parameters()
            .iter()
            .map(|p| p.gradient().unwrap().unwrap().abs().sum(Kind::Double).double_value(&[]))
            .collect();

        // The same by four passes that each reduce.
        model.parameters().iter().for_each(|parameter| parameter.clear_gradient().unwrap());
        handle.set_requires_reduction(true);
        for micro in 0..2 {
            model.forward(&batch(&training, 0, rows(micro))).unwrap().backward();
            handle.finish_backward()?;
        }
        for (sum, parameter) in sums.iter().zip(model.parameters()) {
            let again = parameter.gradient().unwrap().unwrap().abs().sum(Kind::Double).double_value(&[]);
            assert!((sum - again).abs() <= 1e-10 * sum, "{}: {sum} against {again}", parameter.name());
        }
        Ok::<_, Error>(())
    });
    ran.unwrap();
}

#[test]
fn pipelines_keep_their_parameters_by_default() {
    let degrees = Degrees { pp: 2, dp_shard: 2, ..Degrees::default() };
    for step in steps(degrees, &Options::default(), &Training::default()) {
        assert_eq!(step.count("fsdp", Op::AllGather), step.units.len());
    }
}

#[test]
fn gathers_travel_in_the_compute_dtype_and_reductions_in_fp32() {
    let how = Materialize { kind: Kind::Float, compute: Some(Kind::BFloat16), ..Training::default().how };
    let training = Training { how, ..Training::default() };
    let kinds = |options: &Options| {
        let step = steps(shard(2), options, &training).remove(0);
        let kind = |op| step.of("fsdp", op).iter().map(|event| event.kind).collect::<Vec<_>>();
        (kind(Op::AllGather), kind(Op::ReduceScatter))
    };
    let (gathers, reductions) = kinds(&Options::default());
    assert!(gathers.iter().all(|kind| *kind == Kind::BFloat16) && reductions.iter().all(|kind| *kind == Kind::Float));
    let (_, reductions) = kinds(&Options { reduce: Some(Kind::BFloat16), ..Options::default() });
    assert!(reductions.iter().all(|kind| *kind == Kind::BFloat16));
}
