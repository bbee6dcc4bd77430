//! Beside sharded data parallelism and tensor parallelism.

use std::collections::BTreeMap;

use ferrotitan_fsdp::{Fsdp, Handle, Options};
use ferrotitan_mesh::{Degrees, Mesh, View};
use ferrotitan_pp::comm::{BoxError, DeviceMesh, threads};
use ferrotitan_pp::nn::{Batch, Model, Transform};
use ferrotitan_pp::schedule::Algorithm;
use ferrotitan_pp::{Activations, Partition, Pipeline, Split, StageHooks, microbatches};
use ferrotitan_tp::{Plan, TensorParallel};
use tch::Kind;

use crate::harness::options;
use crate::models::llama::{Case, DIM, HOW, SEQ, Share, assert_same};

/// Gathers the units of a stage once a step, and reduces them once.
struct Units {
    handle: Handle,
    of_stage: BTreeMap<usize, Vec<usize>>,
}

impl Units {
    fn new(handle: Handle, partition: &Partition) -> Self {
        let mut of_stage: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for unit in 0..handle.units() {
            let name = handle.name(unit).unwrap();
            for stage in name.split('+').filter_map(|layer| partition.stage_of(layer)) {
                let units = of_stage.entry(stage).or_default();
                if !units.contains(&unit) {
                    units.push(unit);
                }
            }
        }
        handle.set_requires_reduction(false);
        Self { handle, of_stage }
    }

    fn each(&self, stage: usize, of: impl Fn(usize) -> ferrotitan_fsdp::Result<()>) -> Result<(), BoxError> {
        Ok(self.of_stage.get(&stage).into_iter().flatten().try_for_each(|&unit| of(unit))?)
    }
}

impl StageHooks for Units {
    fn unshard(&mut self, stage: usize) -> Result<(), BoxError> {
        self.each(stage, |unit| self.handle.unshard(unit))
    }

    fn reshard(&mut self, stage: usize) -> Result<(), BoxError> {
        self.each(stage, |unit| self.handle.reshard(unit))
    }

    fn reduce(&mut self, stage: usize) -> Result<(), BoxError> {
        self.each(stage, |unit| self.handle.reduce(unit))
    }

    fn finish(&mut self) -> Result<(), BoxError> {
        Ok(self.handle.finish_backward()?)
    }
}

/// This rank's sequences of each microbatch.
fn own(part: &Batch, mesh: &DeviceMesh) -> Batch {
    let parts = microbatches(part, mesh.size(View::LOSS)).unwrap();
    parts.into_iter().nth(mesh.index(View::LOSS)).unwrap()
}

fn tensor_parallel(case: &Case, model: &mut Model, mesh: &DeviceMesh) -> Result<Activations, BoxError> {
    TensorParallel::new(mesh.clone(), ferrotitan_tp::Options::default(), Plan::llama(&case.config()))
        .apply(model, mesh)?;
    // Between stages each rank holds its share of every sequence.
    let (index, ranks) = (mesh.index(View::TP) as i64, mesh.size(View::TP) as i64);
    let share = move |tokens: i64| tokens / ranks + i64::from(index < tokens % ranks);
    let shape = move |batch: &Batch| vec![batch.tokens.size()[0], share(batch.tokens.size()[1]), DIM];
    Ok(Activations::with_shape(shape, Kind::Double))
}

fn check(case: &Case, degrees: Degrees) {
    let what = format!("{case:?} on {degrees:?}");
    let found = threads::run(degrees, &options(), |mesh| -> Result<(Share, u64, u64, usize), BoxError> {
        let mut model = case.model();
        let partition = Partition::of(&model, &Split::default(), &case.schedule())?;
        partition.apply(&mut model, &mesh)?;
        let activations = match mesh.size(View::TP) {
            1 => Activations::new(DIM, Kind::Double),
            _ => tensor_parallel(case, &mut model, &mesh)?,
        };
        let handle = Fsdp::new(&mesh, Options::default()).attach(&mut model)?;
        model.materialize(&HOW, &mesh)?;
        let pipeline = Pipeline::new(&mesh, partition.stages(model), case.plan(), activations)?;
        let mut pipeline = pipeline.with_hooks(Units::new(handle.clone(), &partition));
        let parts = microbatches(&case.batch(), case.microbatches)?;
        let parts: Vec<Batch> = parts.iter().map(|part| own(part, &mesh)).collect();
        let evaluated = pipeline.evaluate(&parts)?;
        let before = handle.stats();
        let loss = pipeline.step(&parts, case.tokens())?;
        assert_eq!(evaluated.double_value(&[]), loss.double_value(&[]));
        let after = handle.stats();
        assert_eq!(after.gathered, 0);
        let (gathers, reductions) = (after.gathers - before.gathers, after.reductions - before.reductions);
        Ok((Share::new(&loss, &pipeline, &mesh), gathers, reductions, handle.units()))
    });
    let mut shares = Vec::new();
    for (share, gathers, reductions, units) in found.unwrap() {
        // Once a step, whatever the number of microbatches.
        let once = if degrees.size(View::FSDP) > 1 { units as u64 } else { 0 };
        assert_eq!(gathers, once, "{what}: gathers of {units} units");
        if degrees.size(View::LOSS) > 1 {
            assert_eq!(reductions, units as u64, "{what}: reductions of {units} units");
        }
        shares.push(share);
    }
    assert_same(&shares, &case.alone(), degrees.tp as f64, &what);
}

#[test]
fn with_sharded_data_parallelism() {
    let degrees = Degrees { pp: 2, dp_shard: 2, ..Degrees::default() };
    let algorithms =
        [Algorithm::OneForwardOneBackward, Algorithm::Interleaved1F1B, Algorithm::Zb1p, Algorithm::DualPipeV];
    for algorithm in algorithms {
        for tied in [false, true] {
            let plain = Case::new(algorithm, 2, algorithm.default_stages_per_rank(), 4);
            check(&Case { tied, rows: 2, checkpoint: tied, ..plain }, degrees);
        }
    }
    let replicated = Degrees { pp: 2, dp_replicate: 2, ..Degrees::default() };
    check(&Case { tied: true, rows: 2, ..Case::new(Algorithm::ZbvZeroBubble, 2, 2, 3) }, replicated);
}

#[test]
fn with_tensor_parallelism() {
    let degrees = Degrees { pp: 2, tp: 2, ..Degrees::default() };
    for algorithm in [Algorithm::OneForwardOneBackward, Algorithm::Zb1p, Algorithm::ZbvZeroBubble] {
        for tied in [false, true] {
            let plain = Case::new(algorithm, 2, algorithm.default_stages_per_rank(), 3);
            check(&Case { tied, chunked: tied, ..plain }, degrees);
        }
    }
    // Shares of a sequence that differ in length.
    const { assert!(SEQ % 4 != 0) };
    check(&Case::new(Algorithm::Zb1p, 2, 1, 3), Degrees { pp: 2, tp: 4, ..Degrees::default() });
}

#[test]
fn with_both() {
    let degrees = Degrees { pp: 2, dp_shard: 2, tp: 2, ..Degrees::default() };
    check(&Case { rows: 2, ..Case::new(Algorithm::InterleavedZeroBubble, 2, 2, 3) }, degrees);
}
