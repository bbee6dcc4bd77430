//! An embedding table that is the head's weight as well.

use ferrotitan_optim::{AdamW, AdamWOptions, NormKind, clip_gradients, gradient_norm};
use ferrotitan_pp::comm::DeviceMesh;
use ferrotitan_pp::microbatches;
use ferrotitan_pp::schedule::Algorithm;
use tch::{Device, Tensor};

use crate::harness::{pipelined, run};
use crate::models::llama::{Case, HOW, Share, assert_same};

const TABLE: &str = "tok_embeddings.weight";

fn case(algorithm: Algorithm, ranks: usize, stages_per_rank: usize, microbatches: usize) -> Case {
    Case { tied: true, ..Case::new(algorithm, ranks, stages_per_rank, microbatches) }
}

#[test]
fn gradients_are_summed_over_the_stages_that_hold_it() {
    let cases = [
        case(Algorithm::OneForwardOneBackward, 2, 1, 3),
        case(Algorithm::Interleaved1F1B, 4, 2, 4),
        case(Algorithm::Zb1p, 4, 1, 5),
        // In a V, the first and the last stage are one rank's.
        case(Algorithm::ZbvZeroBubble, 2, 2, 4),
        case(Algorithm::DualPipeV, 2, 2, 5),
        Case { chunked: true, ..case(Algorithm::Zb1p, 2, 1, 4) },
    ];
    for case in cases {
        let found = pipelined(&case);
        assert_same(&found, &case.alone(), 1.0, &format!("{case:?}"));
        let held = |share: &&Share| share.gradients.iter().any(|(name, ..)| name == TABLE);
        let holders = if case.schedule().placement.last() == Some(&0) { 1 } else { 2 };
        assert_eq!(found.iter().filter(held).count(), holders, "{case:?}");
    }
}

/// Both copies start equal, count once in the norm, and are the same to the bit after updates.
#[test]
fn copies_stay_one_weight() {
    let case = case(Algorithm::OneForwardOneBackward, 4, 1, 4);
    let train = |parameters: Vec<ferrotitan_pp::nn::Parameter>, mesh: &DeviceMesh, step: &mut dyn FnMut()| {
        let mut optimizer = AdamW::new(parameters.clone(), AdamWOptions::default(), &[]).unwrap();
        let mut norms = Vec::new();
        for _ in 0..3 {
            optimizer.clear_gradients().unwrap();
            step();
            norms.push(gradient_norm(&parameters, NormKind::Two, mesh).unwrap());
            clip_gradients(&parameters, norms[norms.len() - 1], 0.5).unwrap();
            optimizer.step(1.0).unwrap();
        }
        norms
    };
    let mut model = case.model();
    let single = DeviceMesh::single(Device::Cpu);
    model.materialize(&HOW, &single).unwrap();
    let parameters = model.parameters();
    let expected = train(parameters.clone(), &single, &mut || {
        (model.forward(&case.batch()).unwrap() / case.tokens()).backward();
    });
    let table = parameters[0].local().unwrap().detach();

    let found = run(4, |mesh| {
        let mut pipeline = case.pipeline(&mesh)?;
        let parts = microbatches(&case.batch(), 4)?;
        let norms = train(pipeline.parameters(), &mesh, &mut || {
            let _ = pipeline.step(&parts, case.tokens()).unwrap();
        });
        let table = pipeline.parameters().into_iter().find(|parameter| parameter.name() == TABLE);
        Ok((norms, table.map(|table| table.local().unwrap().detach())))
    });
    for (norms, _) in &found {
        assert!(norms.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-10 * b), "{norms:?}, not {expected:?}");
    }
    let copies: Vec<&Tensor> = found.iter().filter_map(|(_, table)| table.as_ref()).collect();
    assert_eq!(copies.len(), 2);
    assert_eq!(copies[0], copies[1]);
    assert!((copies[0] - &table).abs().max().double_value(&[]) < 1e-9);
}
