//! Deleting what is no longer wanted. Failures are told of and forgotten: the next save tries again.

use crate::checkpoint::{folder, folders, steps};
use crate::manifest::{MANIFEST, Presence, presence};
use crate::{Result, Store};

/// Deletes all steps but the latest `keep`, of which the one just saved is one, whatever its number. 0 keeps all.
pub(super) fn keep_latest(store: &Store, saved: u64, keep: usize) {
    if keep == 0 {
        return;
    }
    let purge = || -> Result<()> {
        let mut others: Vec<u64> = steps(store)?.into_iter().filter(|step| *step != saved).collect();
        others.sort_unstable_by(|a, b| b.cmp(a));
        for step in others.into_iter().skip(keep - 1) {
            let folder = folder(step);
            // Its manifest first: a step that is half deleted must not exist.
            store.below(&folder).delete(MANIFEST)?;
            store.delete_folder(&folder)?;
            tracing::info!(step, "deleted an old checkpoint");
        }
        Ok(())
    };
    if let Err(error) = purge() {
        tracing::warn!(%error, "cannot delete old checkpoints");
    }
}

/// Deletes what attempts at this step or earlier ones left that never came to their end, except for the current attempt.
pub(super) fn remove_torn(store: &Store, step: u64, attempt: &str) {
    let remove = |torn: u64| -> Result<()> {
        let name = folder(torn);
        let below = store.below(&name);
        match presence(&below)? {
            Presence::There => return Ok(()),
            _ if torn != step => return store.delete_folder(&name),
            Presence::Torn => below.delete(MANIFEST)?,
            Presence::Absent => {}
        }
        for other in below.folders("")?.into_iter().filter(|other| other != attempt) {
            below.delete_folder(&other)?;
        }
        Ok(())
    };
    let remove_all = || folders(store)?.into_iter().filter(|torn| *torn <= step).try_for_each(remove);
    if let Err(error) = remove_all() {
        tracing::warn!(%error, "cannot clean up after a torn save");
    }
}
