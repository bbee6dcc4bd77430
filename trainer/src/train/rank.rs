//! What one rank does: build, train, measure, tell.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrotitan_comm::DeviceMesh;
use ferrotitan_data::{Cursor, Loader, LoaderOptions};
use ferrotitan_mesh::{Mesh as _, View};
use ferrotitan_optim::{AdamW, AdamWOptions, Decay, LrSchedule};

use super::compose::Composition;
use super::corpus::Corpora;
use super::report::{Report, peak_memory};
use super::{step, validate};
use crate::config::sections::DecayType;
use crate::metrics::StepMetrics;
use crate::plan::Plan;

/// Trains to the end of the plan as one rank.
pub(super) fn train(plan: &Plan, corpora: &Corpora, mesh: &DeviceMesh) -> anyhow::Result<()> {
    let mut composition = Composition::new(plan, mesh)?;
    let mut optimizer = AdamW::new(composition.parameters.clone(), adamw(plan), &[])?;
    let schedule = schedule(plan)?;
    let (rank, ranks) = (mesh.index(View::BATCH) as u64, mesh.size(View::BATCH) as u64);
    let share = LoaderOptions::new(plan.data.global_batch as u64).for_rank(rank, ranks);
    let mut loader = Loader::new(Arc::clone(&corpora.training), Cursor::default(), share)?;
    let mut report = match mesh.rank() {
        0 => Some(Report::begin(plan, mesh, &composition.parameters)?),
        _ => None,
    };
    let (mut began, mut waited) = (Instant::now(), Duration::ZERO);
    for number in 1..=plan.steps {
        let Some(share) = loader.next().transpose()? else {
            tracing::warn!("the data ended before step {number} of {}", plan.steps);
            break;
        };
        let factor = schedule.factor(number - 1);
        let outcome = step::step(plan, mesh, &mut composition, &mut optimizer, &share, factor)?;
        let seconds = began.elapsed().as_secs_f64();
        let data = (loader.waited() - waited).as_secs_f64();
        let last = number == plan.steps;
        let due = plan.validation.as_ref().filter(|validation| last || number.is_multiple_of(validation.every));
        let validation_loss = match (due, &corpora.validation) {
            (Some(validation), Some(dataset)) => {
                Some(validate::loss(plan, validation, dataset, mesh, &mut composition)?)
            }
            _ => None,
        };
        if let Some(report) = &mut report {
            let mut extras = vec![("data_seconds".to_owned(), data)];
            extras.extend(validation_loss.map(|loss| ("validation_loss".to_owned(), loss)));
            report.step(&StepMetrics {
                step: number,
                loss: outcome.loss,
                grad_norm: outcome.gradient_norm,
                lr: plan.optimizer.lr * factor,
                tokens: (plan.data.global_batch * plan.data.seq_len) as u64,
                seconds,
                memory: peak_memory(mesh),
                extras,
            })?;
            if let Some(loss) = validation_loss {
                report.line(&format!("validate step: {number:2}  loss: {loss:7.4}"));
            }
        }
        // Neither validation nor telling is part of a step's time.
        (began, waited) = (Instant::now(), loader.waited());
    }
    Ok(())
}

fn adamw(plan: &Plan) -> AdamWOptions {
    let optimizer = &plan.optimizer;
    let (beta1, beta2) = optimizer.betas;
    AdamWOptions { lr: optimizer.lr, beta1, beta2, eps: optimizer.eps, weight_decay: optimizer.weight_decay }
}

fn schedule(plan: &Plan) -> ferrotitan_optim::Result<LrSchedule> {
    let schedule = &plan.schedule;
    let shape = match schedule.decay {
        DecayType::Linear => Decay::Linear,
        DecayType::Sqrt => Decay::Sqrt,
        DecayType::Cosine => Decay::Cosine,
    };
    LrSchedule::new(schedule.steps, schedule.warmup, schedule.decay_ratio, shape, schedule.floor)
}
