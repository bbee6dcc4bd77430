//! What one rank does: build, train, measure, tell.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrotitan_comm::DeviceMesh;
use ferrotitan_data::{Loader, LoaderOptions};
use ferrotitan_mesh::{Mesh as _, View};
use ferrotitan_optim::{AdamW, AdamWOptions, Decay, LrSchedule};

#[cfg(feature = "checkpoint")]
use super::checkpoint;
use super::compose::Composition;
use super::corpus::Corpora;
use super::exporters::RankExporter;
use super::progress::Progress;
use super::report::{Report, cost, peak_memory};
use super::watch::{Phase, Rank};
use super::{SPANS, held, step, validate};
use crate::config::sections::DecayType;
use crate::metrics::{Record, StepMetrics};
use crate::plan::Plan;

/// Trains to the end of the plan as one rank.
pub(super) fn train(
    plan: &Plan,
    corpora: &Corpora,
    mesh: &DeviceMesh,
    watched: &Rank,
    exporter: &mut RankExporter,
) -> anyhow::Result<()> {
    let mut composition = Composition::new(plan, mesh)?;
    let mut optimizer = AdamW::new(composition.parameters.clone(), adamw(plan), &[])?;
    let schedule = schedule(plan)?;
    let (rank, ranks) = (mesh.index(View::BATCH) as u64, mesh.size(View::BATCH) as u64);
    let share = LoaderOptions::new(plan.data.global_batch as u64).for_rank(rank, ranks);
    #[cfg(feature = "checkpoint")]
    if let Some(asked) = plan.checkpoint.as_ref().filter(|asked| asked.seed_only) {
        return checkpoint::save_seed(plan, asked, mesh, &composition);
    }
    #[cfg(not(feature = "checkpoint"))]
    let mut progress = Progress::default();
    #[cfg(feature = "checkpoint")]
    let mut progress = checkpoint::start(plan, mesh, &composition, &optimizer)?;
    #[cfg(feature = "checkpoint")]
    let mut checkpoints = checkpoint::Checkpoints::of(plan, mesh)?;
    let mut loader = Loader::new(Arc::clone(&corpora.training), progress.cursor, share)?;
    let held = held::by_all(&composition.parameters, mesh)?;
    let mut report = match mesh.rank() {
        0 => Some(Report::begin(plan, mesh, &held, progress.step)?),
        _ => None,
    };
    let cost = cost(plan, mesh);
    let (mut began, mut waited) = (Instant::now(), Duration::ZERO);
    // What is known of a step only after it stands in the record of the next.
    let mut extras = Vec::new();
    for number in progress.step + 1..=plan.steps {
        exporter.begin(number)?;
        let step_span = tracing::trace_span!(target: SPANS, "step", step = number).entered();
        watched.step(number);
        watched.at(Phase::Data);
        let Some(share) = tracing::trace_span!(target: SPANS, "data").in_scope(|| loader.next()).transpose()? else {
            tracing::warn!("the data ended before step {number} of {}", plan.steps);
            break;
        };
        let factor = schedule.factor(progress.schedule);
        watched.at(Phase::Passes);
        let looks = exporter.exports();
        let stepped = step::step(plan, mesh, watched, looks, &mut composition, &mut optimizer, &share, factor);
        // Every rank stops there alike: what is still being saved is worth the wait.
        #[cfg(feature = "checkpoint")]
        if stepped.as_ref().is_err_and(|error| error.is::<step::Diverged>())
            && let Some(checkpoints) = checkpoints.take()
        {
            checkpoints.finish()?;
        }
        let outcome = stepped?;
        let tokens = (plan.data.global_batch * plan.data.seq_len) as u64;
        progress = Progress {
            step: number,
            schedule: progress.schedule + 1,
            cursor: loader.cursor(),
            tokens: progress.tokens + tokens,
        };
        drop(step_span);
        let seconds = began.elapsed().as_secs_f64();
        exporter.stepped();
        #[cfg(feature = "pp")]
        for (began, spans) in composition.take_pipeline_spans() {
            exporter.pipeline(began, &spans);
        }
        let data = (loader.waited() - waited).as_secs_f64();
        let last = number == plan.steps;
        let due = plan.validation.as_ref().filter(|validation| last || number.is_multiple_of(validation.every));
        let validation_loss = match (due, &corpora.validation) {
            (Some(validation), Some(dataset)) => {
                watched.at(Phase::Validation);
                let _validation = tracing::trace_span!(target: SPANS, "validation").entered();
                Some(validate::loss(plan, validation, dataset, mesh, &mut composition)?)
            }
            _ => None,
        };
        watched.at(Phase::Metrics);
        extras.push(("data_seconds".to_owned(), data));
        extras.extend(validation_loss.map(|loss| ("validation_loss".to_owned(), loss)));
        let step = StepMetrics {
            step: number,
            loss: outcome.loss,
            grad_norm: outcome.gradient_norm,
            lr: plan.optimizer.lr * factor,
            tokens,
            seconds,
            memory: peak_memory(mesh),
            extras: std::mem::take(&mut extras),
        };
        exporter.end(&Record::new(step.clone(), cost), progress.tokens, outcome.largest_loss)?;
        if let Some(report) = &mut report {
            report.step(&step)?;
            if let Some(loss) = validation_loss {
                report.line(&format!("validate step: {number:2}  loss: {loss:7.4}"));
            }
        }
        #[cfg(feature = "checkpoint")]
        if let Some(checkpoints) = &mut checkpoints {
            watched.at(Phase::Checkpoint);
            let _checkpoint = tracing::trace_span!(target: SPANS, "checkpoint").entered();
            let times = checkpoints.after_step(&progress, &composition, &optimizer)?;
            extras.extend(times.into_iter().flatten());
        }
        // Neither validation nor telling nor saving is part of a step's time.
        (began, waited) = (Instant::now(), loader.waited());
    }
    #[cfg(feature = "checkpoint")]
    if let Some(checkpoints) = checkpoints {
        watched.at(Phase::Checkpoint);
        checkpoints.finish()?;
    }
    if let Some(report) = report {
        report.finish(plan, mesh, &held)?;
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
