//! Steps of an optimizer, and the global norm of the gradients.

use ferrotitan_comm::DeviceMesh;
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{Materialize, Model};
use ferrotitan_optim::{AdamW, AdamWOptions, NormKind, clip_gradients, gradient_norm};
use ferrotitan_tp::Options;
use tch::{Device, Kind};

use crate::support::{HOW, batch, config, divided, on_ranks};

/// Losses and gradient norms of 20 steps with clipping.
fn train(config: &LlamaConfig, kind: Kind, model: &mut Model, mesh: &DeviceMesh) -> Vec<[f64; 2]> {
    model.materialize(&Materialize { kind, ..HOW }, mesh).unwrap();
    let parameters = model.parameters();
    let mut adamw = AdamW::new(parameters.clone(), AdamWOptions { lr: 0.01, ..AdamWOptions::default() }, &[]).unwrap();
    let step = |_| {
        let loss = model.forward(&batch(4, 9, config.vocab_size as i64)).unwrap() / 28.0;
        loss.backward();
        let norm = gradient_norm(&parameters, NormKind::Two, mesh).unwrap();
        clip_gradients(&parameters, norm, 0.5).unwrap();
        adamw.step(1.0).unwrap();
        adamw.clear_gradients().unwrap();
        [loss.double_value(&[]), norm]
    };
    (0..20).map(step).collect()
}

#[test]
fn twenty_steps_are_the_same() {
    // Key-value heads on two ranks each: the norm counts them once.
    let config = config(8, 2, 27, 37);
    for (kind, first, last) in [(Kind::Double, 1e-10, 1e-8), (Kind::Float, 1e-6, 1e-4)] {
        let expected = train(&config, kind, &mut build(&config).unwrap(), &DeviceMesh::single(Device::Cpu));
        assert!(expected[19][0] < 0.9 * expected[0][0], "it learns: {expected:?}");
        for sequence_parallel in [true, false] {
            let options = Options { sequence_parallel, ..Options::default() };
            let ranks = on_ranks(4, |mesh| train(&config, kind, &mut divided(&config, &mesh, options).unwrap(), &mesh));
            for (step, (ours, theirs)) in ranks.iter().flat_map(|rank| rank.iter().zip(&expected).enumerate()) {
                let tolerance = if step == 0 { first } else { last };
                for (ours, theirs) in ours.iter().zip(theirs) {
                    assert!(
                        (ours - theirs).abs() < tolerance * theirs,
                        "{kind:?}, step {step}: {ours} against {theirs}"
                    );
                }
            }
        }
    }
}
