//! `ferrotitan train`: checks the config, then trains as one rank, or starts the ranks that do.

use super::FAILED;
use super::config::{check_file, load, world};
use super::console::{color, print, say};
use crate::config::check::{Surroundings, World};
use crate::config::{Flag, Loaded, show};
use crate::launch::{self, Machines, Outcome, Place, Prefix, Sink, Spec};
use crate::metrics::{init_log, wants_color};
use crate::plan::{Backend, Plan};
use crate::train::{self, Exporters};
use anyhow::Context;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How long ranks may take to end once one has died.
const GRACE: Duration = Duration::from_secs(5);

/// Trains. `words` are the words of the command line, for the ranks to be started with.
pub(super) fn run(
    file: Option<&Path>,
    flags: &[Flag],
    nproc: Option<usize>,
    machines: Machines,
    live: bool,
    words: &[OsString],
) -> anyhow::Result<ExitCode> {
    let place = Place::read()?;
    let loaded = load(file, flags)?;
    let around = surroundings(&place, nproc, &machines);
    let Ok((plan, notes)) = check_file(&loaded, &around) else { return Ok(ExitCode::from(FAILED)) };

    let ranks = plan.degrees.world_size();
    let starts_ranks = place == Place::Alone && plan.comm.backend == Backend::Processes && ranks > 1;
    if starts_ranks && !ranks.is_multiple_of(machines.count) {
        anyhow::bail!("{ranks} ranks cannot be spread evenly over {} machines", machines.count);
    }
    if live && (starts_ranks || place != Place::Alone) {
        anyhow::bail!("the live view shows ranks that are threads: set comm.backend to \"threads\"");
    }
    // The launcher has no rank.
    let exporters = match &place {
        _ if starts_ranks => None,
        Place::Rank(environment) => Some(environment.rank..environment.rank + 1),
        Place::Alone => Some(0..ranks),
    };
    let exporters = exporters.map(|ranks| Exporters::start(&plan, ranks, live)).transpose()?;
    let layers = exporters.as_ref().map(Exporters::layers).unwrap_or_default();
    init_log(color() && !plan.metrics.plain, layers);
    // Once for all ranks.
    if place.rank() == 0 && !launch::launched() {
        for note in notes {
            tracing::warn!("{note}");
        }
        tell_config(&loaded, &plan)?;
    }
    let Some(exporters) = exporters else { return start(&plan, ranks / machines.count, machines, words) };
    let ran = train::run(&plan, &exporters);
    exporters.finish();
    ran.map(|()| ExitCode::SUCCESS)
}

fn surroundings(place: &Place, nproc: Option<usize>, machines: &Machines) -> Surroundings {
    let cuda_devices = ferrotitan_ext::cuda::device_count();
    match place {
        Place::Rank(environment) => Surroundings {
            world: Some(World { size: environment.world_size, says: format!("WORLD_SIZE={}", environment.world_size) }),
            separate: true,
            nodes: environment.world_size.div_ceil(environment.local_world_size.max(1)),
            cuda_devices,
        },
        Place::Alone => {
            Surroundings { world: world(nproc, machines.count), separate: false, nodes: machines.count, cuda_devices }
        }
    }
}

/// Prints and saves the complete config, where it asks for that.
fn tell_config(loaded: &Loaded, plan: &Plan) -> anyhow::Result<()> {
    let job = &loaded.config.job;
    if job.print_config {
        print(&show(&loaded.config));
    }
    if let Some(name) = &job.save_config_file {
        let path = plan.dump_folder.join(name);
        let save = || {
            std::fs::create_dir_all(path.parent().unwrap_or(&plan.dump_folder))?;
            std::fs::write(&path, show(&loaded.config))
        };
        save().with_context(|| format!("cannot write the config to {}", path.display()))?;
    }
    Ok(())
}

/// Starts the ranks of this machine, and waits for them.
fn start(plan: &Plan, ranks: usize, machines: Machines, words: &[OsString]) -> anyhow::Result<ExitCode> {
    let spec = Spec {
        program: std::env::current_exe().context("cannot find this program's own file")?,
        args: words.to_vec(),
        ranks,
        machines,
        grace: GRACE,
        prefix: Prefix { color: wants_color(io::stdout().is_terminal()) },
        stdout: Sink::new(io::stdout()),
        stderr: Sink::new(io::stderr()),
    };
    #[cfg(feature = "telemetry")]
    train::watch::Watch::new(&plan.comm, spec.machines.index == 0)?;
    let ended = launch::launch(&spec)?;
    #[cfg(feature = "telemetry")]
    if let Outcome::Died { .. } = ended.outcome
        && let Some(report) = train::watch::conclude(&plan.comm, &ended.ranks, plan.degrees.world_size())
    {
        say(&report);
    }
    Ok(match ended.outcome {
        Outcome::Success => ExitCode::SUCCESS,
        Outcome::Died { rank, death } => {
            let others = if ranks > 1 { "; the other ranks were ended" } else { "" };
            say(&format!("error: rank {rank} {death}{others}"));
            ExitCode::from(FAILED)
        }
        Outcome::Interrupted(signal) => {
            say("error: interrupted; all ranks were ended");
            // As shells count it.
            ExitCode::from(128 + u8::try_from(signal).unwrap_or(0))
        }
    })
}
