//! From evidence to findings.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

use serde::Serialize;

use super::folder::{REPORT, write};
use super::waits::{self, Graph};
use super::words::{between, ranks, seconds, verb};
use super::{Dump, Evidence, Phase, Wait, faults, mismatch};
use crate::{CollectiveRecord, Error, Place, Result};

/// What kind of thing went wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// The process ended without a word.
    Died,
    /// The rank's own work failed.
    Failed,
    /// Ranks called different things.
    Mismatch,
    /// The others wait for a rank that left no record.
    NoRecord,
    /// The others wait for a rank that is at something else.
    Stuck,
    /// The others wait for a rank that has ended well.
    Ended,
    /// Ranks wait for each other in a circle.
    Circle,
    /// All have entered a collective, and it has not ended.
    Transport,
}

/// The collective that a rank has not entered, or that ranks disagree on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Missed {
    /// The operation's name, such as `all-reduce`.
    pub op: String,
    /// Its number in its group.
    pub sequence: u64,
    /// The group's name.
    pub group: String,
}

/// One thing that went wrong.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Finding {
    /// What kind of thing.
    pub cause: Cause,
    /// The ranks that it is about.
    pub ranks: Vec<usize>,
    /// The collective that it is about.
    pub missed: Option<Missed>,
    /// What the rank was at.
    pub phase: Option<Phase>,
    /// For how long, in seconds.
    pub seconds: Option<f64>,
    /// The ranks that waited because of it.
    pub waiting: Vec<usize>,
    /// All of it in words.
    pub says: String,
}

/// What went wrong, the most important first, and who waited for whom.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// How many ranks there were.
    pub world_size: usize,
    /// Of how many there are records.
    pub records: usize,
    /// What went wrong.
    pub findings: Vec<Finding>,
    /// Who waited for whom, the longest wait first.
    pub waits: Vec<Wait>,
    /// What is missing or broken, and what ranks said.
    pub notes: Vec<String>,
}

/// Finds out what went wrong.
pub fn analyse(evidence: &Evidence) -> Report {
    let mut waits = waits::find(evidence);
    waits.sort_by_key(|wait| wait.since);
    let case = Case { evidence, graph: Graph::new(&waits), waits };
    let (mut findings, mut explained) = (Vec::new(), BTreeSet::new());
    let mismatches = mismatch::find(evidence);
    for fault in faults::find(evidence, !mismatches.is_empty()) {
        explained.extend(fault.ranks.iter().copied());
        findings.push(case.of_fault(fault));
    }
    findings.extend(mismatches.iter().map(|mismatch| case.of_mismatch(mismatch)));
    let mut roots: Vec<Finding> = Vec::new();
    for root in case.graph.roots().into_iter().filter(|root| !explained.contains(root)) {
        let disagrees = case.waits.iter().any(|wait| wait.rank == root) && !mismatches.is_empty();
        if !disagrees {
            roots.push(case.of_root(root));
        }
    }
    // Those that others wait for the longest come first, and before them those of which nothing is known.
    roots.sort_by_key(|finding| (finding.cause != Cause::NoRecord, std::cmp::Reverse(finding.waiting.len())));
    findings.append(&mut roots);
    findings.extend(case.of_circles());
    if findings.is_empty() {
        findings.extend(case.of_transport());
    }
    let Case { waits, .. } = case;
    let (world_size, records) = (evidence.world_size, evidence.dumps.len());
    Report { world_size, records, findings, waits, notes: faults::notes(evidence) }
}

struct Case<'a> {
    evidence: &'a Evidence,
    waits: Vec<Wait>,
    graph: Graph,
}

impl Case<'_> {
    /// `rank 3 (pp 1, tp 1)`, whether it left a record or not.
    fn named(&self, rank: usize) -> String {
        let dumps = &self.evidence.dumps;
        let own = dumps.get(&rank).map(|dump| dump.place.clone());
        let place = own.or_else(|| dumps.values().find_map(|dump| dump.place.of(rank)));
        place.unwrap_or(Place { rank, ..Place::default() }).to_string()
    }

    fn all_named(&self, several: &[usize]) -> String {
        match several {
            [rank] => self.named(*rank),
            _ => ranks(several),
        }
    }

    /// Of the collectives in which a rank is waited for, the one that it should have come to first.
    fn missed(&self, rank: usize) -> Option<(Missed, &str)> {
        let waits: Vec<&Wait> = self.waits.iter().filter(|wait| wait.missing.contains(&rank)).collect();
        // All ranks run one program, so what whoever waits has come to before, this one should come to before too.
        let is_later = |wait: &Wait| {
            let dump = self.evidence.dumps.get(&wait.rank);
            let mut others = waits.iter().filter(|other| !other.is_message());
            others.any(|other| dump.is_some_and(|dump| came_first(dump, other, wait) > 0))
        };
        let wait = waits.iter().find(|wait| !is_later(wait)).or(waits.first())?;
        let Wait { op, sequence, group, what, .. } = wait;
        Some((Missed { op: op.clone(), sequence: *sequence, group: group.clone() }, what))
    }

    /// `; ranks 0 to 2 wait`.
    fn waiting(&self, several: &[usize]) -> (Vec<usize>, String) {
        let behind = several.iter().flat_map(|&rank| self.graph.behind(rank));
        let behind: BTreeSet<usize> = behind.filter(|rank| !several.contains(rank)).collect();
        let behind: Vec<usize> = behind.into_iter().collect();
        let words = match behind.is_empty() {
            true => String::new(),
            false => format!("; {} {}", ranks(&behind), verb(&behind, "wait")),
        };
        (behind, words)
    }

    fn of_fault(&self, fault: faults::Fault) -> Finding {
        let faults::Fault { cause, ranks: several, phase, says, .. } = fault;
        let (waiting, words) = self.waiting(&several);
        let missed = several.first().and_then(|&rank| self.missed(rank));
        let entered = missed.as_ref().map_or_else(String::new, |(_, what)| format!("; it had not entered {what}"));
        let says = format!("{} {says}{entered}{words}", self.all_named(&several));
        let missed = missed.map(|(missed, _)| missed);
        Finding { cause, ranks: several, missed, phase, seconds: None, waiting, says }
    }

    fn of_mismatch(&self, mismatch: &mismatch::Mismatch) -> Finding {
        let mismatch::Mismatch { suspects, op, sequence, group, members, says, .. } = mismatch;
        let waiting = members.iter().copied().filter(|rank| !suspects.contains(rank)).collect();
        Finding {
            cause: Cause::Mismatch,
            ranks: suspects.clone(),
            missed: Some(Missed { op: op.clone(), sequence: *sequence, group: group.clone() }),
            phase: None,
            seconds: None,
            waiting,
            says: format!("{} {says}", self.all_named(suspects)),
        }
    }

    /// Of a rank that others wait for, and that waits for nobody.
    fn of_root(&self, rank: usize) -> Finding {
        let (waiting, words) = self.waiting(&[rank]);
        let missed = self.missed(rank);
        let what = missed.as_ref().map_or("", |(_, what)| what);
        let dump = self.evidence.dumps.get(&rank);
        let standing = self.waits.iter().find(|wait| wait.rank == rank);
        let (cause, state) = match (dump, standing) {
            (Some(_), Some(wait)) => {
                let since = seconds(wait.seconds);
                (Cause::Transport, format!("it is in {}, which all have entered, since {since}", wait.what))
            }
            (Some(dump), None) => {
                let since = seconds(between(dump.phase_since, dump.written));
                let step = if dump.step > 0 { format!(", at step {}", dump.step) } else { String::new() };
                (Cause::Stuck, format!("it is {} since {since}{step}", dump.phase))
            }
            (None, _) => match self.evidence.ends.ranks.get(&rank) {
                Some(end) if end.well => (Cause::Ended, "it has ended".to_owned()),
                Some(end) => (Cause::NoRecord, format!("it left no record, and {} when told to end", end.how)),
                None => (Cause::NoRecord, "it left no record: it stands still, or was killed".to_owned()),
            },
        };
        Finding {
            cause,
            ranks: vec![rank],
            phase: dump.map(|dump| dump.phase),
            seconds: dump.map(|dump| between(dump.phase_since, dump.written)),
            waiting,
            says: format!("{} has not entered {what}; {state}{words}", self.named(rank)),
            missed: missed.map(|(missed, _)| missed),
        }
    }

    /// Of ranks that wait for each other. One that stands somewhere while it is missing elsewhere has gone on if most ranks
    /// came to the other place first.
    fn of_circles(&self) -> Option<Finding> {
        let circle = self.graph.circles();
        let inside: Vec<&Wait> = self.waits.iter().filter(|wait| circle.contains(&wait.rank)).collect();
        let mut votes: BTreeMap<usize, i64> = BTreeMap::new();
        for wait in inside.iter().filter(|wait| !wait.is_message()) {
            for stands in inside.iter().filter(|other| wait.missing.contains(&other.rank) && !other.is_message()) {
                let witnesses = self.evidence.dumps.values().filter(|dump| dump.place.rank != stands.rank);
                let sum = witnesses.map(|dump| came_first(dump, wait, stands)).sum();
                let most = votes.entry(stands.rank).or_insert(sum);
                *most = sum.max(*most);
            }
        }
        let most = votes.values().copied().max().filter(|&most| most > 0);
        let mut several: Vec<usize> = votes.iter().filter(|&(_, &sum)| Some(sum) == most).map(|(&r, _)| r).collect();
        if several.is_empty() {
            several.clone_from(&inside.iter().find(|wait| !wait.missing.is_empty())?.missing);
        }
        // Where there is no third to tell, nobody knows which of two is right.
        let missed = if let [only] = several.as_slice() { self.missed(*only) } else { None };
        let begin = match &missed {
            Some((_, what)) => format!("{} has not entered {what}", self.all_named(&several)),
            None => format!("{} wait for each other", self.all_named(&several)),
        };
        let stand: Vec<String> = inside.iter().filter(|w| several.contains(&w.rank)).map(|wait| wait.says()).collect();
        let waiting: Vec<usize> = circle.into_iter().filter(|rank| !several.contains(rank)).collect();
        let says = format!(
            "{begin}; {}: the ranks wait in a circle, so one left a collective out or called it in another order",
            stand.join(", "),
        );
        let missed = missed.map(|(missed, _)| missed);
        Some(Finding { cause: Cause::Circle, ranks: several, missed, phase: None, seconds: None, waiting, says })
    }

    fn of_transport(&self) -> Option<Finding> {
        let first = self.waits.iter().find(|wait| wait.missing.is_empty())?;
        let same = |wait: &&Wait| wait.what == first.what && wait.missing.is_empty();
        let several: BTreeSet<usize> = self.waits.iter().filter(same).map(|wait| wait.rank).collect();
        let several: Vec<usize> = several.into_iter().collect();
        let says = format!(
            "{} {} in {}, which all have entered, since {}: the network or the device does not answer, or is slow",
            self.all_named(&several),
            if several.len() == 1 { "is" } else { "are" },
            first.what,
            seconds(first.seconds),
        );
        let Wait { op, sequence, group, seconds, .. } = first.clone();
        Some(Finding {
            cause: Cause::Transport,
            ranks: several,
            missed: Some(Missed { op, sequence, group }),
            phase: None,
            seconds: Some(seconds),
            waiting: Vec::new(),
            says,
        })
    }
}

/// What a rank's record says of the order of two places: 1 where it came to the first one first, -1 where to the second.
fn came_first(dump: &Dump, first: &Wait, second: &Wait) -> i64 {
    let came = |wait: &Wait| dump.entered.get(&wait.group).is_some_and(|&entered| entered > wait.sequence);
    let place = |wait: &Wait| {
        let same = |c: &CollectiveRecord| c.peer.is_none() && (&c.group, c.sequence) == (&wait.group, wait.sequence);
        dump.collectives.iter().position(same)
    };
    match (came(first), came(second)) {
        (true, false) => 1,
        (false, true) => -1,
        (false, false) => 0,
        (true, true) => match (place(first), place(second)) {
            (Some(first), Some(second)) if first < second => 1,
            (Some(_), Some(_)) => -1,
            _ => 0,
        },
    }
}

/// More waits than this nobody reads.
const WAITS_SHOWN: usize = 16;

impl Report {
    /// Writes `report.txt` and `report.json` into a folder.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn write(&self, folder: &Path) -> Result<()> {
        write(&folder.join(REPORT).with_extension("json"), self)?;
        let path = folder.join(REPORT).with_extension("txt");
        fs::write(&path, self.to_string()).map_err(|source| Error::Write { path, source })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "why the run ended, by the records of {} of {} ranks:", self.records, self.world_size)?;
        if self.findings.is_empty() {
            writeln!(f, "  nothing was found: no rank failed, and none waited for another")?;
        }
        for (number, finding) in self.findings.iter().enumerate() {
            writeln!(f, "  {}. {}", number + 1, finding.says)?;
        }
        if !self.waits.is_empty() {
            writeln!(f, "who waited:")?;
        }
        for wait in self.waits.iter().take(WAITS_SHOWN) {
            writeln!(f, "  {}", wait.says())?;
        }
        if self.waits.len() > WAITS_SHOWN {
            writeln!(f, "  and {} more", self.waits.len() - WAITS_SHOWN)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}
