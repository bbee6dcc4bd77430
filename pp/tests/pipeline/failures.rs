//! What goes wrong is said at once, by the rank that it concerns, and nobody hangs.

use std::time::{Duration, Instant};

use ferrotitan_mesh::Degrees;
use ferrotitan_pp::comm::{self, BoxError, DeviceMesh, threads};
use ferrotitan_pp::nn::{self, Batch, Layer, NamedLayer, Parameter};
use ferrotitan_pp::schedule::{Algorithm, Lowered, LoweringOptions, Op, Schedule, lower};
use ferrotitan_pp::{Activations, Error, Partition, Pipeline, Split, StageHooks, microbatches};
use tch::{Device, Kind, Tensor};

use crate::harness::{options, run};
use crate::models::llama::{Case, DIM, HOW};

/// The identity, until it has been called so many times.
#[derive(Debug)]
struct Fails {
    after: usize,
    panics: bool,
}

impl Layer for Fails {
    fn forward(&mut self, x: &Tensor, _batch: &Batch) -> nn::Result<Tensor> {
        if self.after == 0 {
            assert!(!self.panics, "out of luck");
            return Err(nn::Error::Config("out of luck".into()));
        }
        self.after -= 1;
        Ok(x.shallow_clone())
    }

    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }
}

fn fail_on_rank(failing: usize, panics: bool) -> comm::Error {
    let case = Case::new(Algorithm::Zb1p, 4, 1, 6);
    let begun = Instant::now();
    let outcome = threads::run(Degrees { pp: 4, ..Degrees::default() }, &options(), |mesh| -> Result<(), BoxError> {
        let mut pipeline = case.pipeline(&mesh)?;
        if mesh.world().rank() == failing {
            let model = pipeline.stage_mut(failing).unwrap();
            model.layers_mut().insert(0, NamedLayer::new("fails", Fails { after: 2, panics }));
        }
        let _ = pipeline.step(&microbatches(&case.batch(), 6)?, case.tokens())?;
        Ok(())
    });
    assert!(begun.elapsed() < Duration::from_secs(20));
    outcome.unwrap_err()
}

#[test]
fn a_rank_that_fails_ends_the_step_of_all() {
    for rank in [1, 3] {
        let message = fail_on_rank(rank, false).to_string();
        let expected = format!("rank {rank}: {rank}F2 on rank {rank} along pp: layer fails: out of luck");
        assert_eq!(message, expected);
        let message = fail_on_rank(rank, true).to_string();
        assert!(message.starts_with(&format!("rank {rank} panicked: out of luck")), "{message}");
    }
}

/// The ranks that wait are told who failed, and in which action they waited.
#[test]
fn who_waits_is_told_why() {
    let case = Case::new(Algorithm::OneForwardOneBackward, 2, 1, 4);
    let told = std::sync::Mutex::new(String::new());
    let outcome = threads::run(Degrees { pp: 2, ..Degrees::default() }, &options(), |mesh| -> Result<(), BoxError> {
        let mut pipeline = case.pipeline(&mesh)?;
        if mesh.world().rank() == 1 {
            return Err("the machine went away".into());
        }
        let step = pipeline.step(&microbatches(&case.batch(), 4)?, case.tokens());
        *told.lock().unwrap() = step.unwrap_err().to_string();
        Ok(())
    });
    assert!(outcome.is_err());
    let told = told.into_inner().unwrap();
    assert!(told.contains("0 on rank 0 along pp: rank 1 failed: the machine went away"), "{told}");
}

#[test]
fn a_schedule_for_other_ranks_is_refused() {
    let case = Case::new(Algorithm::OneForwardOneBackward, 4, 1, 4);
    let messages = run(2, |mesh| {
        let mut model = case.model();
        let partition = Partition::of(&model, &Split::default(), &case.schedule())?;
        let split = partition.keep(&mut model, &mesh).unwrap_err();
        let built = Pipeline::new(&mesh, Vec::new(), case.plan(), Activations::new(DIM, Kind::Double)).unwrap_err();
        assert!(matches!((&split, &built), (Error::Ranks { .. }, Error::Ranks { needed: 4, found: 2, .. })));
        Ok([split.to_string(), built.to_string()])
    });
    for message in messages.iter().flatten() {
        assert!(message.starts_with("schedule 1F1B is for 4 ranks, but the mesh has 2 along pp"), "{message}");
    }
}

#[test]
fn another_number_of_microbatches_is_refused() {
    let case = Case::new(Algorithm::OneForwardOneBackward, 2, 1, 4);
    run(2, |mesh| {
        let mut pipeline = case.pipeline(&mesh)?;
        let parts = microbatches(&case.batch(), 2)?;
        for error in [pipeline.step(&parts, 1.0).unwrap_err(), pipeline.evaluate(&parts).unwrap_err()] {
            assert!(matches!(error, Error::Microbatches { needed: 4, given: 2, .. }), "{error}");
        }
        assert!(matches!(microbatches(&case.batch(), 3), Err(Error::Indivisible { rows: 4, microbatches: 3 })));
        // Nothing was sent, so that the pipeline still runs.
        let _ = pipeline.step(&microbatches(&case.batch(), 4)?, case.tokens())?;
        Ok(())
    });
}

/// On one rank, whose error is not another's.
fn alone(case: &Case, plan: Lowered, activations: Activations, batch: &Batch) -> Result<(), Error> {
    let mesh = DeviceMesh::single(Device::Cpu);
    let mut model = case.model();
    let partition = Partition::of(&model, &Split::default(), &case.schedule())?;
    partition.keep(&mut model, &mesh)?;
    model.materialize(&HOW, &mesh)?;
    let mut pipeline = Pipeline::new(&mesh, partition.stages(model), plan, activations)?;
    let _ = pipeline.step(&microbatches(batch, case.microbatches)?, 1.0)?;
    Ok(())
}

#[test]
fn wrong_activations_are_named() {
    let case = Case::new(Algorithm::Interleaved1F1B, 1, 2, 2);
    for activations in [Activations::new(DIM + 1, Kind::Double), Activations::new(DIM, Kind::Float)] {
        let message = alone(&case, case.plan(), activations, &case.batch()).unwrap_err().to_string();
        assert!(message.starts_with("0F0 on rank 0 along pp: stage 0 sends [1, 6, 16] Double"), "{message}");
        assert!(message.contains("expects [1, 6, 17] Double") || message.contains("expects [1, 6, 16] Float"));
    }
}

#[test]
fn a_last_stage_without_labels_is_named() {
    let case = Case::new(Algorithm::GPipe, 1, 2, 2);
    let batch = Batch { labels: None, ..case.batch() };
    let error = alone(&case, case.plan(), Activations::new(DIM, Kind::Double), &batch).unwrap_err().to_string();
    assert!(error.starts_with("1F0 on rank 0 along pp: microbatch 0 has no labels"), "{error}");
}

#[test]
fn stages_that_the_schedule_places_elsewhere_are_refused() {
    let case = Case::new(Algorithm::DualPipeV, 2, 2, 4);
    let other = Case::new(Algorithm::Interleaved1F1B, 2, 2, 4);
    let messages = run(2, |mesh| {
        let mut model = case.model();
        let partition = Partition::of(&model, &Split::default(), &case.schedule())?;
        partition.keep(&mut model, &mesh)?;
        let stages = partition.stages(model);
        let built = Pipeline::new(&mesh, stages, other.plan(), Activations::new(DIM, Kind::Double));
        Ok(built.unwrap_err().to_string())
    });
    let expected = "rank 1 along pp was given stages [1, 2], but schedule Interleaved1F1B places [1, 3] there";
    assert_eq!(messages[1], expected);
}

/// A list that would hang is refused before anything is sent.
#[test]
fn an_unsound_list_is_refused() {
    let case = Case::new(Algorithm::OneForwardOneBackward, 2, 1, 3);
    let messages = run(2, |mesh| {
        let mut plan = case.plan();
        let send = plan.ranks[0].iter().position(|op| matches!(op, Op::Send(_))).unwrap();
        plan.ranks[0].remove(send);
        Ok(Pipeline::new(&mesh, Vec::new(), plan, Activations::new(DIM, Kind::Double)).unwrap_err().to_string())
    });
    assert!(messages[0].contains("cannot run"), "{}", messages[0]);
    assert_eq!(messages[0], messages[1]);
}

#[test]
fn a_model_of_other_layers_is_refused() {
    let case = Case::new(Algorithm::GPipe, 1, 2, 2);
    let mut model = case.model();
    let partition = Partition::of(&model, &Split::default(), &case.schedule()).unwrap();
    assert_eq!(partition.stage_of("output"), Some(1));
    assert_eq!(partition.stage_of("input"), None);
    assert_eq!(partition.layers().concat().len(), model.layers().len());
    model.layers_mut().pop();
    let error = partition.keep(&mut model, &DeviceMesh::single(Device::Cpu)).unwrap_err();
    assert!(error.to_string().contains("norm, but the stages are of"), "{error}");
}

/// A schedule of one's own, without reductions in its list, still reduces every stage once.
#[test]
fn hooks_are_called_in_order_and_their_errors_named() {
    #[derive(Clone, Default)]
    struct Noted(std::sync::Arc<std::sync::Mutex<Vec<String>>>);
    impl Noted {
        fn note(&self, what: String) -> Result<(), BoxError> {
            let mut noted = self.0.lock().unwrap();
            noted.push(what);
            if noted.len() > 9 { Err("enough".into()) } else { Ok(()) }
        }
    }
    impl StageHooks for Noted {
        fn unshard(&mut self, stage: usize) -> Result<(), BoxError> {
            self.note(format!("unshard {stage}"))
        }
        fn reshard(&mut self, stage: usize) -> Result<(), BoxError> {
            self.note(format!("reshard {stage}"))
        }
        fn reduce(&mut self, stage: usize) -> Result<(), BoxError> {
            self.note(format!("reduce {stage}"))
        }
        fn finish(&mut self) -> Result<(), BoxError> {
            self.note("finish".into())
        }
    }
    // The two stages of a V share the table, so that neither can be reduced before both are through: the last weight
    // gradient of stage 1 comes after those of stage 0 that are not put off.
    let schedule = Schedule::from_csv("mine", "0F0,1F0,1I0,0B0,1W0\n").unwrap();
    let case = Case { tied: true, ..Case::new(Algorithm::GPipe, 1, 2, 1) };
    let mesh = DeviceMesh::single(Device::Cpu);
    let mut model = case.model();
    let partition = Partition::of(&model, &Split::default(), &schedule).unwrap();
    partition.keep(&mut model, &mesh).unwrap();
    model.materialize(&HOW, &mesh).unwrap();
    let plan = lower(&schedule, &LoweringOptions { unshard: true, ..LoweringOptions::default() }).unwrap();
    let noted = Noted::default();
    let activations = Activations::new(DIM, Kind::Double);
    let mut pipeline = Pipeline::new(&mesh, partition.stages(model), plan, activations).unwrap();
    pipeline = pipeline.with_hooks(noted.clone());
    let parts = microbatches(&case.batch(), 1).unwrap();
    let _ = pipeline.step(&parts, 1.0).unwrap();
    let called = noted.0.lock().unwrap().join(", ");
    assert_eq!(called, "unshard 0, unshard 1, reshard 0, reduce 1, reduce 0, reshard 1, finish");
    let mut plan = pipeline.plan().clone();
    plan.ranks[0].retain(|op| !matches!(op, Op::ReduceGradient(_)));
    plan.check().unwrap();
    // An evaluation unshards and reshards alone; the third call is one too many.
    let error = pipeline.evaluate(&parts).unwrap_err();
    assert_eq!(error.to_string(), "0RESHARD on rank 0 along pp: hook reshard: enough");
}
