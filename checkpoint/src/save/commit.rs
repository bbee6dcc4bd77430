//! How a step comes to exist.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use super::write::{Job, index_name, note_name};
use crate::manifest::{MANIFEST, Manifest, seal};
use crate::{Error, Result};

/// How often rank 0 looks for the other ranks' parts: soon at first, then less often.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_secs(1));

/// The most bytes of a rank's words of why it failed.
const NOTE: u64 = 64 << 10;

/// On rank 0: waits for all ranks' parts, checks that together they are the tensors, and writes the manifest, from which
/// moment on the step exists.
pub(super) fn commit(job: &Job, mine: Manifest) -> Result<()> {
    let mut manifest = Manifest::new(job.step, job.state.clone());
    manifest.merge(mine)?;
    let mut missing: BTreeSet<usize> = (1..job.world_size).collect();
    let (begun, mut pause) = (Instant::now(), PAUSE.0);
    let store = job.step_store();
    while !missing.is_empty() {
        job.check_given_up()?;
        for rank in arrived(job, &missing)? {
            manifest.merge(Manifest::read(&store, &job.path(&index_name(rank)), job.step)?)?;
            missing.remove(&rank);
        }
        if !missing.is_empty() {
            let after = begun.elapsed();
            if after > job.options.patience {
                return Err(Error::Absent { ranks: missing.into_iter().collect(), after });
            }
            thread::sleep(pause.min(job.options.patience.saturating_sub(after)));
            pause = (pause * 2).min(PAUSE.1);
        }
    }
    if let Err((tensor, reason)) = manifest.check() {
        return Err(Error::Coverage { tensor: tensor.to_owned(), reason });
    }
    let sealed = seal(&manifest)?;
    let put = store.put_if_absent(MANIFEST, sealed.clone());
    // A request whose answer was lost may have done its work, and, made again, finds its own manifest.
    let is_there = || store.get(MANIFEST, sealed.len() as u64).is_ok_and(|there| there == sealed);
    if matches!(put, Ok(true)) || is_there() {
        return Ok(());
    }
    put?;
    Err(Error::StepExists { step: job.step, address: job.store.to_string() })
}

/// Of the missing ranks, those whose part is there now.
fn arrived(job: &Job, missing: &BTreeSet<usize>) -> Result<Vec<usize>> {
    let store = job.step_store();
    let listed: BTreeSet<String> = store.list(&job.attempt)?.into_iter().map(|(path, _)| path).collect();
    if let Some(&rank) = missing.iter().find(|rank| listed.contains(&job.path(&note_name(**rank)))) {
        let note = store.get(&job.path(&note_name(rank)), NOTE)?;
        return Err(Error::RankFailed { rank, reason: String::from_utf8_lossy(&note).into_owned() });
    }
    Ok(missing.iter().copied().filter(|rank| listed.contains(&job.path(&index_name(*rank)))).collect())
}
