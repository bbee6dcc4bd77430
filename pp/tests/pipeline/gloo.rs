//! The same over Gloo, the backend of processes, with its ranks on threads.

use ferrotitan_pp::microbatches;
use ferrotitan_pp::schedule::Algorithm;

use crate::harness::run_over_gloo;
use crate::models::llama::{Case, Share, assert_same};

#[test]
fn schedules_train_the_same_model() {
    for case in [
        Case::new(Algorithm::OneForwardOneBackward, 2, 1, 5),
        Case { tied: true, ..Case::new(Algorithm::Interleaved1F1B, 4, 2, 6) },
        Case { tied: true, ..Case::new(Algorithm::Zb1p, 3, 1, 2) },
        Case::new(Algorithm::ZbvZeroBubble, 2, 2, 4),
        Case::new(Algorithm::DualPipeV, 4, 2, 9),
    ] {
        let found = run_over_gloo(case.ranks, |mesh| {
            let mut pipeline = case.pipeline(&mesh)?;
            let parts = microbatches(&case.batch(), case.microbatches)?;
            let evaluated = pipeline.evaluate(&parts)?;
            let loss = pipeline.step(&parts, case.tokens())?;
            assert_eq!(evaluated, loss);
            Ok(Share::new(&loss, &pipeline, &mesh))
        });
        assert_same(&found, &case.alone(), 1.0, &format!("{case:?} over Gloo"));
    }
}
