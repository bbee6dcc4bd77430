//! An input gradient does no work for weights; a weight gradient does no other.

use std::sync::{Arc, Mutex};

use ferrotitan_mesh::Grid;
use ferrotitan_pp::comm::DeviceMesh;
use ferrotitan_pp::nn::{Gemm, Materialize, Model, Native, Result, Seam};
use ferrotitan_pp::schedule::Algorithm;
use ferrotitan_pp::{Activations, Deferral, Partition, Pipeline, Split, microbatches};
use tch::{Device, Kind, Tensor};

use crate::harness::run;
use crate::models::llama::{Case, DIM, HOW};

/// libtorch's products, noted.
#[derive(Debug, Clone, Default)]
struct Noted(Arc<Mutex<String>>);

impl Noted {
    fn note(&self, what: char) {
        self.0.lock().unwrap().push(what);
    }

    fn attach(&self, model: &mut Model) {
        for (_, seam) in model.seams() {
            if let Seam::Linear(linear) = seam {
                linear.projections_mut().iter_mut().for_each(|projection| projection.gemm = Arc::new(self.clone()));
            }
        }
    }

    /// What was done, once where it was done several times in a row.
    fn take(&self) -> String {
        let mut noted: Vec<char> = std::mem::take(&mut *self.0.lock().unwrap()).chars().collect();
        noted.dedup();
        noted.into_iter().collect()
    }
}

impl Gemm for Noted {
    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.note('o');
        Native.output(x, weight)
    }

    fn input_gradient(&self, dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.note('i');
        Native.input_gradient(dy, weight)
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
        self.note('w');
        Native.weight_gradient(dy, x, weight)
    }
}

#[test]
fn the_two_gradients_come_apart() {
    let mesh = DeviceMesh::single(Device::Cpu);
    for (checkpoint, chunked, expected) in [
        (false, false, "oiwoiwoiw"),
        // Blocks are computed again in the input gradient.
        (true, false, "oioioiw".repeat(3).as_str()),
    ] {
        let case = Case { checkpoint, chunked, ..Case::new(Algorithm::Zb1p, 1, 1, 3) };
        let noted = Noted::default();
        let mut model = case.model();
        noted.attach(&mut model);
        let partition = Partition::of(&model, &Split::default(), &case.schedule()).unwrap();
        model.materialize(&HOW, &mesh).unwrap();
        let activations = Activations::new(DIM, Kind::Double);
        let mut pipeline = Pipeline::new(&mesh, partition.stages(model), case.plan(), activations).unwrap();
        let _ = pipeline.step(&microbatches(&case.batch(), 3).unwrap(), case.tokens()).unwrap();
        assert_eq!(noted.take(), expected);
    }
}

/// Weights that are cast, and read through a function of their own, as tensor parallelism has some.
#[test]
fn what_lies_between_a_weight_and_its_product_is_run_as_well() {
    let case = Case::new(Algorithm::Zb1p, 1, 1, 2);
    let how = Materialize { compute: Some(Kind::Float), ..HOW };
    let gradients = |put_off: bool| {
        let (mut model, deferral) = (case.model(), Deferral::default());
        deferral.attach(&mut model);
        model.materialize(&how, &Grid::single()).unwrap();
        let parameters = model.parameters();
        parameters.iter().for_each(|parameter| parameter.set_reader(Some(Arc::new(|weight| Ok(weight * 2.0)))));
        // Of the first block's projections, the first is frozen.
        parameters[1].set_trainable(false);
        let loss = model.forward(&case.batch()).unwrap() / 7.0;
        if put_off {
            let ((), rest) = deferral.defer(|| loss.backward());
            assert_eq!(rest.len(), 7 * case.config().n_layers);
            rest.run().unwrap();
        } else {
            loss.backward();
        }
        parameters.into_iter().map(|parameter| parameter.gradient().unwrap()).collect::<Vec<_>>()
    };
    for (index, pair) in gradients(true).into_iter().zip(gradients(false)).enumerate() {
        match pair {
            (None, None) => assert_eq!(index, 1),
            (Some(found), Some(expected)) => {
                assert_eq!((found.kind(), &found), (Kind::Double, &expected), "parameter {index}");
            }
            _ => panic!("parameter {index} has a gradient in one way alone"),
        }
    }
}

/// A stage that nothing is trained in takes part all the same.
#[test]
fn a_frozen_stage_has_no_gradients_and_the_others_theirs() {
    let case = Case::new(Algorithm::Zb1p, 2, 1, 3);
    let expected = case.alone();
    let found = run(2, |mesh| {
        let mut pipeline = case.pipeline(&mesh)?;
        let frozen = mesh.world().rank() == 0;
        pipeline.parameters().iter().for_each(|parameter| parameter.set_trainable(!frozen));
        let _ = pipeline.step(&microbatches(&case.batch(), 3)?, case.tokens())?;
        let gradient = |p: ferrotitan_pp::nn::Parameter| (p.name().to_owned(), p.gradient().unwrap());
        Ok(pipeline.parameters().into_iter().map(gradient).collect::<Vec<_>>())
    });
    assert!(found[0].iter().all(|(_, gradient)| gradient.is_none()));
    for (name, gradient) in &found[1] {
        let (gradient, expected) = (gradient.as_ref().unwrap(), &expected.gradients[name]);
        let scale = expected.abs().max().double_value(&[]);
        assert!((gradient - expected).abs().max().double_value(&[]) <= 1e-10 * scale, "{name}");
    }
}

#[test]
fn what_is_put_off_is_what_was_left_out() {
    let case = Case::new(Algorithm::Zb1p, 1, 1, 1);
    let (noted, deferral) = (Noted::default(), Deferral::default());
    let mut model = case.model();
    noted.attach(&mut model);
    deferral.attach(&mut model);
    model.materialize(&HOW, &Grid::single()).unwrap();
    let whole = |model: &Model| -> Vec<Option<Tensor>> {
        let gradient = |p: &ferrotitan_pp::nn::Parameter| p.gradient().unwrap().map(|gradient| gradient.copy());
        model.parameters().iter().map(gradient).collect()
    };

    // A backward outside `defer` is a whole one.
    (model.forward(&case.batch()).unwrap() / 7.0).backward();
    let expected = whole(&model);
    assert!(expected.iter().all(Option::is_some));
    model.parameters().iter().for_each(|parameter| parameter.clear_gradient().unwrap());

    let loss = model.forward(&case.batch()).unwrap() / 7.0;
    let ((), rest) = deferral.defer(|| loss.backward());
    // Seven projections a block, and the head; norms and the embedding have theirs.
    let projections = 7 * case.config().n_layers + 1;
    assert_eq!((rest.len(), rest.is_empty()), (projections, false));
    assert_eq!(whole(&model).iter().filter(|gradient| gradient.is_none()).count(), projections);
    rest.run().unwrap();
    for (found, expected) in whole(&model).iter().zip(&expected) {
        let difference = found.as_ref().unwrap() - expected.as_ref().unwrap();
        assert!(difference.abs().max().double_value(&[]) < 1e-15);
    }
}
