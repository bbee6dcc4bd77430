//! Ranks whose own end is a cause: killed, or failed by themselves.

use super::words::ranks;
use super::{Cause, Evidence, Phase, Reason};

/// One rank's own fault, or the same one of several.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) cause: Cause,
    pub(super) ranks: Vec<usize>,
    /// When it was written down, as far as anybody did.
    pub(super) when: i64,
    pub(super) phase: Option<Phase>,
    pub(super) says: String,
}

/// Those that died, then those that failed; the earliest first. Where ranks `disagreed` on a collective, its failure is no
/// fault of its own.
pub(super) fn find(evidence: &Evidence, disagreed: bool) -> Vec<Fault> {
    let mut found: Vec<Fault> = Vec::new();
    for (&rank, end) in &evidence.ends.ranks {
        let dump = evidence.dumps.get(&rank);
        // One that ends by itself and with a record has said why.
        if end.told || end.well || (!end.by_signal && dump.is_some()) {
            continue;
        }
        let (when, phase) = (dump.map_or(0, |dump| dump.written), dump.map(|dump| dump.phase));
        let says = match phase {
            Some(phase) => format!("{} {phase}", end.how),
            None => end.how.clone(),
        };
        found.push(Fault { cause: Cause::Died, ranks: vec![rank], when, phase, says });
    }
    let mut failed: Vec<Fault> = Vec::new();
    let reasons = if disagreed { &[Reason::Failed][..] } else { &[Reason::Failed, Reason::CollectiveFailed] };
    for (&rank, dump) in evidence.dumps.iter().filter(|(_, dump)| reasons.contains(&dump.reason)) {
        if found.iter().any(|fault| fault.ranks.contains(&rank)) {
            continue;
        }
        let error = dump.error.as_deref().unwrap_or("no reason given");
        let says = format!("failed {}: {error}", dump.phase);
        match failed.iter_mut().find(|fault| fault.says == says) {
            Some(same) => {
                same.ranks.push(rank);
                same.when = same.when.min(dump.written);
            }
            None => failed.push(Fault {
                cause: Cause::Failed,
                ranks: vec![rank],
                when: dump.written,
                phase: Some(dump.phase),
                says,
            }),
        }
    }
    failed.sort_by_key(|fault| fault.when);
    found.append(&mut failed);
    found
}

/// What else is to be said of the evidence: what is missing of it, what is broken, and what ranks said of each other.
pub(super) fn notes(evidence: &Evidence) -> Vec<String> {
    let mut notes = Vec::new();
    let silent: Vec<usize> = (0..evidence.world_size).filter(|rank| !evidence.dumps.contains_key(rank)).collect();
    if !silent.is_empty() {
        notes.push(format!("{} left no record", ranks(&silent)));
    }
    let aborted = evidence.ends.ranks.values().filter(|end| !end.told && end.how.contains("SIGABRT")).count();
    if aborted > 1 {
        notes
            .push("Gloo aborts ranks that bring different shapes to a collective; `comm.verify` names them".to_owned());
    }
    notes.extend(evidence.broken.iter().map(|(name, reason)| format!("{name} cannot be used: {reason}")));
    for (rank, dump) in &evidence.dumps {
        let tells = matches!(dump.reason, Reason::TimedOut | Reason::Mismatched | Reason::CollectiveFailed);
        if let Some(error) = dump.error.as_ref().filter(|_| tells) {
            notes.push(format!("rank {rank} said: {error}"));
        }
    }
    notes
}
