//! What a rank holds: as much as the verifier says, and no longer than it must.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_pp::nn::{Batch, Layer, NamedLayer, Parameter, Result};
use ferrotitan_pp::schedule::{Algorithm, Costs, verify};
use ferrotitan_pp::{Activations, Partition, Pipeline, Split, microbatches};
use tch::{Kind, Tensor};

use crate::harness::run;
use crate::models::llama::{Case, DIM, HOW};

/// How many graphs a layer's passes have alive, and the most that there were.
#[derive(Debug, Default)]
struct Alive {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// The identity, which counts the graphs that it is part of.
#[derive(Debug)]
struct Counting(Arc<Alive>);

impl Layer for Counting {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> Result<Tensor> {
        if !autograd::is_grad_enabled() || !x.requires_grad() {
            return Ok(x.shallow_clone());
        }
        let now = self.0.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.most.fetch_max(now, Ordering::SeqCst);
        Ok(autograd::apply(Counted(Arc::clone(&self.0)), &[x])?.remove(0))
    }

    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }
}

struct Counted(Arc<Alive>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Function for Counted {
    fn forward(&mut self, _context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        Ok(vec![inputs[0].shallow_clone()])
    }

    fn backward(&mut self, _: &mut Context, upstream: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> {
        Ok(upstream)
    }
}

#[test]
fn peaks_are_the_verifier_s() {
    let flexible = Algorithm::Flexible { microbatches_per_round: 5 };
    for algorithm in Algorithm::ALL.into_iter().chain([flexible]) {
        let case = Case::new(algorithm, 4, algorithm.default_stages_per_rank(), 9);
        let schedule = case.schedule();
        let expected = verify(&schedule, &Costs::default()).unwrap();
        let found = run(4, |mesh| {
            let mut model = case.model();
            let partition = Partition::of(&model, &Split::default(), &schedule)?;
            partition.keep(&mut model, &mesh)?;
            model.materialize(&HOW, &mesh)?;
            let mut stages = partition.stages(model);
            let alive = Arc::new(Alive::default());
            for stage in &mut stages {
                // After the embedding, which is what the first layer of all is.
                stage.model.layers_mut().insert(1, NamedLayer::new("counting", Counting(Arc::clone(&alive))));
            }
            let mut pipeline = Pipeline::new(&mesh, stages, case.plan(), Activations::new(DIM, Kind::Double))?;
            let _ = pipeline.step(&microbatches(&case.batch(), case.microbatches)?, case.tokens())?;
            assert_eq!(alive.now.load(Ordering::SeqCst), 0, "{algorithm} leaks graphs");
            Ok((pipeline.statistics().clone(), alive.most.load(Ordering::SeqCst)))
        });
        for (rank, ((statistics, most), expected)) in found.iter().zip(&expected.ranks).enumerate() {
            let found = (statistics.peak_live, statistics.peak_held, *most);
            assert_eq!(found, (expected.peak_live, expected.peak_held, expected.peak_live), "{algorithm}, rank {rank}");
            assert_eq!(statistics.spans.len(), schedule.ranks[rank].len());
            assert!(statistics.spans.iter().zip(&schedule.ranks[rank]).all(|(span, step)| span.step == *step));
            assert!(statistics.spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}

/// A stage is its own layers and nothing else.
#[test]
fn a_stage_allocates_its_own_layers_alone() {
    let case = Case::new(Algorithm::DualPipeV, 4, 2, 2);
    let held = run(4, |mesh| {
        let mut pipeline = case.pipeline(&mesh)?;
        assert_eq!(pipeline.stages(), [mesh.world().rank(), 7 - mesh.world().rank()]);
        assert!(pipeline.stages().into_iter().all(|stage| pipeline.stage_mut(stage).is_some()));
        assert!(pipeline.stage_mut(8).is_none());
        Ok(pipeline.parameters().iter().map(|p| p.local().unwrap().numel()).collect::<Vec<_>>())
    });
    assert_eq!(held.iter().flatten().sum::<usize>(), case.config().parameters());
    assert!(held.iter().all(|rank| rank.iter().sum::<usize>() < case.config().parameters() / 2));
}
