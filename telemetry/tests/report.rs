//! Hang reports of random meshes and programs, with one fault each: the right rank, group and operation are named.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;

use ferrotitan_telemetry::report::{
    Cause, Dump, End, Ends, Evidence, Phase, Reason, Wait, analyse, clear, read_folder,
};
use ferrotitan_telemetry::{CollectiveRecord, Coordinate, Error, Place};
use proptest::prelude::*;

const SECOND: i64 = 1_000_000_000;
const OPS: [&str; 4] = ["all-reduce", "all-gather", "reduce-scatter", "broadcast"];

/// One collective of the program: the dimensions of its group, the operation, the shape.
#[derive(Clone, Debug, PartialEq)]
struct Item {
    group: String,
    op: &'static str,
    shape: i64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Stuck,
    Dies,
    LeavesNoRecord,
    Fails,
    Skips,
    OtherShape,
    OtherOp,
}

const FAULTS: [Fault; 7] =
    [Fault::Stuck, Fault::Dies, Fault::LeavesNoRecord, Fault::Fails, Fault::Skips, Fault::OtherShape, Fault::OtherOp];

/// The place of a rank in a mesh, with a group for every set of dimensions.
fn place(sizes: &[usize], rank: usize) -> Place {
    let names = ["pp", "dp", "tp"];
    let world_size: usize = sizes.iter().product();
    let along = |(at, &size): (usize, &usize)| Coordinate { dimension: names[at].to_owned(), index: 0, size };
    let origin = Place { world_size, coordinates: sizes.iter().enumerate().map(along).collect(), ..Place::default() };
    let mut place = origin.of(rank).unwrap();
    for set in 1..1_usize << sizes.len() {
        let within = |at: usize| set >> at & 1 == 1;
        let name: Vec<&str> = (0..sizes.len()).filter(|&at| within(at)).map(|at| names[at]).collect();
        let same =
            |other: &Place| (0..sizes.len()).all(|at| within(at) || other.coordinates[at] == place.coordinates[at]);
        let members: Vec<usize> = (0..world_size).filter(|&other| same(&origin.of(other).unwrap())).collect();
        if members.len() > 1 {
            place.groups.insert(name.join("+"), members);
        }
    }
    place
}

/// One rank of the simulation.
struct Rank {
    place: Place,
    program: Vec<Item>,
    next: usize,
    entered: BTreeMap<String, u64>,
    records: Vec<CollectiveRecord>,
    halted: bool,
}

impl Rank {
    fn waits(&self) -> Option<&CollectiveRecord> {
        self.records.last().filter(|record| record.finished.is_none())
    }
}

/// Runs all ranks until none gets on, each one collective a second. A collective ends when all have entered and agree.
fn simulate(mut ranks: Vec<Rank>) -> Vec<Rank> {
    for second in 0..1000 {
        let now = second * SECOND;
        let mut moved = false;
        for rank in &mut ranks {
            if rank.halted || rank.waits().is_some() || rank.next == rank.program.len() {
                continue;
            }
            let item = rank.program[rank.next].clone();
            rank.next += 1;
            let sequence = rank.entered.entry(item.group.clone()).or_default();
            rank.records.push(CollectiveRecord {
                sequence: *sequence,
                call: format!("{} of Float [{}]", item.op, item.shape),
                group: item.group,
                op: item.op.to_owned(),
                shape: vec![item.shape],
                dtype: "Float".to_owned(),
                issued: now,
                waited: Some(now),
                ..CollectiveRecord::default()
            });
            *sequence += 1;
            moved = true;
        }
        for rank in 0..ranks.len() {
            let Some(record) = ranks[rank].waits().cloned() else { continue };
            let members = &ranks[rank].place.groups[&record.group];
            let agrees = |&member: &usize| {
                let same =
                    |other: &&CollectiveRecord| (&other.group, other.sequence) == (&record.group, record.sequence);
                ranks[member].records.iter().find(same).is_some_and(|other| other.call == record.call)
            };
            if members.iter().all(agrees) {
                ranks[rank].records.last_mut().unwrap().finished = Some(now + 1);
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    ranks
}

fn dump(rank: &Rank) -> Dump {
    let written = 2000 * SECOND;
    let since = rank.records.last().and_then(|record| record.finished).unwrap_or(0);
    Dump {
        place: rank.place.clone(),
        reason: if rank.waits().is_some() { Reason::TimedOut } else { Reason::PeerFailed },
        error: None,
        written,
        phase: if rank.halted { Phase::Data } else { Phase::Forward },
        phase_since: since,
        step: 1,
        entered: rank.entered.clone(),
        collectives: rank.records.clone(),
    }
}

#[derive(Clone, Debug)]
struct Scene {
    sizes: Vec<usize>,
    program: Vec<Item>,
    fault: Fault,
    rank: usize,
    at: usize,
}

fn scenes() -> impl Strategy<Value = Scene> {
    let mesh = prop::collection::vec(1_usize..4, 1..=3)
        .prop_filter("ranks", |sizes| (2..=12).contains(&sizes.iter().product::<usize>()));
    let groups = prop::collection::vec((any::<prop::sample::Index>(), 0..OPS.len()), 1..12);
    let fault = prop::sample::select(&FAULTS[..]);
    (mesh, groups, fault, any::<prop::sample::Index>(), any::<prop::sample::Index>()).prop_map(
        |(sizes, groups, fault, rank, at)| {
            let known: Vec<String> = place(&sizes, 0).groups.into_keys().collect();
            let item = |(number, (group, op)): (usize, &(prop::sample::Index, usize))| Item {
                group: known[group.index(known.len())].clone(),
                op: OPS[*op],
                shape: number as i64 + 1,
            };
            let program: Vec<Item> = groups.iter().enumerate().map(item).collect();
            let rank = rank.index(sizes.iter().product());
            let at = at.index(program.len());
            Scene { sizes, program, fault, rank, at }
        },
    )
}

fn evidence(scene: &Scene) -> Evidence {
    let Scene { sizes, program, fault, rank: culprit, at } = scene;
    let world_size = sizes.iter().product();
    let start = |rank: usize| {
        let mut program = program.clone();
        let mut halted = false;
        if rank == *culprit {
            match fault {
                Fault::Stuck | Fault::Dies | Fault::LeavesNoRecord | Fault::Fails => program.truncate(*at),
                Fault::Skips => drop(program.remove(*at)),
                Fault::OtherShape => program[*at].shape = 77,
                Fault::OtherOp => program[*at].op = "all-to-all",
            }
            halted = false;
        }
        let (entered, records) = (BTreeMap::new(), Vec::new());
        Rank { place: place(sizes, rank), program, next: 0, entered, records, halted }
    };
    let mut ranks = simulate((0..world_size).map(start).collect());
    ranks[*culprit].halted = true;
    let mut evidence = Evidence::default();
    for rank in &ranks {
        let mut dump = dump(rank);
        if rank.place.rank == *culprit {
            match fault {
                Fault::Dies => {
                    let end = End { how: "was killed by SIGKILL".into(), well: false, by_signal: true, told: false };
                    evidence.add_ends(Ends { world_size, ranks: [(*culprit, end)].into() }).unwrap();
                    continue;
                }
                Fault::LeavesNoRecord => continue,
                Fault::Fails => {
                    (dump.reason, dump.error) = (Reason::Failed, Some("the disk is full".to_owned()));
                }
                _ => {}
            }
        }
        evidence.add(dump).unwrap();
    }
    evidence
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn the_right_rank_and_collective_are_named(scene in scenes()) {
        let Scene { program, fault, rank, at, .. } = &scene;
        let report = analyse(&evidence(&scene));
        let text = report.to_string();
        let item = &program[*at];
        let number = program[..*at].iter().filter(|other| other.group == item.group).count() as u64;
        let Some(first) = report.findings.first() else { panic!("nothing found in {scene:?}") };
        prop_assert!(first.ranks.contains(rank), "{scene:?}\n{text}");
        let Some(missed) = first.missed.clone() else {
            // Two ranks that accuse each other, of which nobody else knows better.
            prop_assert_eq!((first.cause, first.ranks.len()), (Cause::Circle, 2), "{:?}\n{}", scene, text);
            prop_assert_eq!(scene.sizes.iter().product::<usize>(), 2, "{:?}\n{}", scene, text);
            let stands = |wait: &Wait| (&wait.group, wait.sequence) == (&item.group, number);
            prop_assert!(report.waits.iter().any(stands), "{scene:?}\n{text}");
            return Ok(());
        };
        prop_assert_eq!((&missed.group, missed.sequence), (&item.group, number), "{:?}\n{}", scene, text);
        let cause = match fault {
            Fault::Stuck => Some(Cause::Stuck),
            Fault::Dies => Some(Cause::Died),
            Fault::LeavesNoRecord => Some(Cause::NoRecord),
            Fault::Fails => Some(Cause::Failed),
            Fault::OtherShape | Fault::OtherOp => Some(Cause::Mismatch),
            // Which one depends on what the rank comes to next.
            Fault::Skips => None,
        };
        prop_assert!(cause.is_none_or(|cause| cause == first.cause), "{scene:?}\n{text}");
        if cause.is_some_and(|cause| cause != Cause::Mismatch) {
            prop_assert_eq!(&first.ranks, &vec![*rank]);
            prop_assert_eq!(&missed.op, item.op);
            // All that wait do so because of it.
            let waits: std::collections::BTreeSet<usize> = report.waits.iter().map(|wait| wait.rank).collect();
            prop_assert_eq!(&first.waiting, &waits.into_iter().collect::<Vec<_>>(), "{:?}\n{}", scene, text);
        }
        // Where others run the same, the one that differs is known.
        let others = place(&scene.sizes, 0).groups[&item.group].len() > 2;
        if others {
            prop_assert_eq!(&first.ranks, &vec![*rank], "{:?}\n{}", scene, text);
        }
    }

    #[test]
    fn nonsense_is_survived(
        records in prop::collection::vec((0_u64..4, 0_usize..3, any::<i64>(), prop::option::of(0_usize..6), any::<bool>()), 0..12),
        ranks in prop::collection::vec(0_usize..8, 1..8),
        members in prop::collection::vec(0_usize..9, 0..6),
        size in 0_usize..9,
    ) {
        let mut evidence = Evidence::default();
        for rank in ranks {
            let record = |(sequence, op, time, peer, ended): &(u64, usize, i64, Option<usize>, bool)| CollectiveRecord {
                sequence: *sequence,
                group: "tp".to_owned(),
                op: ["send", "recv", "barrier"][*op].to_owned(),
                peer: *peer,
                issued: *time,
                waited: Some(time.wrapping_mul(3)),
                finished: ended.then_some(i64::MIN),
                ..CollectiveRecord::default()
            };
            let mut dump = Dump {
                place: place(&[2, 3], rank % 6),
                reason: Reason::Told,
                error: None,
                written: i64::MIN,
                phase: Phase::Data,
                phase_since: i64::MAX,
                step: u64::MAX,
                entered: BTreeMap::from([("tp".to_owned(), u64::MAX)]),
                collectives: records.iter().map(record).collect(),
            };
            dump.place.groups.insert("tp".to_owned(), members.clone());
            dump.place.world_size = size;
            let _ = evidence.add(dump);
        }
        let _ = analyse(&evidence).to_string();
    }
}

/// A rank of two along pp, and its messages: sent or received, the number, whether it is done.
fn messages(rank: usize, records: &[(&str, u64, &str, bool)], phase: Phase) -> Dump {
    let record = |&(op, sequence, dtype, done): &(&str, u64, &str, bool)| CollectiveRecord {
        sequence,
        group: "pp".to_owned(),
        op: op.to_owned(),
        peer: Some(1 - rank),
        shape: vec![4],
        dtype: dtype.to_owned(),
        issued: 5 * SECOND,
        waited: Some(5 * SECOND),
        finished: done.then_some(6 * SECOND),
        ..CollectiveRecord::default()
    };
    Dump {
        place: place(&[2], rank),
        reason: Reason::TimedOut,
        error: Some("gave up".to_owned()),
        written: 50 * SECOND,
        phase,
        phase_since: 9 * SECOND,
        step: 3,
        entered: BTreeMap::new(),
        collectives: records.iter().map(record).collect(),
    }
}

fn of(dumps: impl IntoIterator<Item = Dump>) -> Evidence {
    let mut evidence = Evidence::default();
    dumps.into_iter().for_each(|dump| evidence.add(dump).unwrap());
    evidence
}

#[test]
fn a_message_that_was_not_sent() {
    let sender = messages(0, &[("send", 0, "Float", true)], Phase::Data);
    let receiver = messages(1, &[("recv", 0, "Float", true), ("recv", 1, "Float", false)], Phase::Forward);
    let report = analyse(&of([sender, receiver]));
    assert_eq!(
        report.findings[0].says,
        "rank 0 (pp 0) has not entered recv #1 on pp from rank 0; it is in the data loader since 41 s, at step 3; \
         rank 1 waits"
    );
}

#[test]
fn a_message_of_another_dtype() {
    let sender = messages(0, &[("send", 0, "Half", true)], Phase::Data);
    let receiver = messages(1, &[("recv", 0, "Float", false)], Phase::Forward);
    let first = analyse(&of([sender, receiver])).findings.remove(0);
    assert_eq!((first.cause, first.ranks), (Cause::Mismatch, vec![0, 1]));
    assert!(
        first.says.contains("disagree by another dtype: rank 0 called send #0 on pp to rank 1 of Half"),
        "{}",
        first.says
    );
}

#[test]
fn a_message_on_its_way() {
    let sender = messages(0, &[("send", 0, "Float", true)], Phase::Data);
    let receiver = messages(1, &[("recv", 0, "Float", false)], Phase::Forward);
    let report = analyse(&of([sender, receiver]));
    assert_eq!(report.findings.len(), 1);
    assert_eq!((report.findings[0].cause, &report.findings[0].ranks[..]), (Cause::Transport, &[1][..]));
}

#[test]
fn the_sentence_of_the_manual() {
    // Of a mesh of two by two, rank 3 reads data while the others stand where they should.
    let waits_in = |rank, group: &str, sequence, waited| {
        let record = CollectiveRecord {
            sequence,
            group: group.to_owned(),
            op: "all-reduce".to_owned(),
            call: "all-reduce of Float [1]".to_owned(),
            issued: waited,
            waited: Some(waited),
            ..CollectiveRecord::default()
        };
        let entered = BTreeMap::from([("tp".to_owned(), 183), (group.to_owned(), sequence + 1)]);
        Dump { place: place4(rank), entered, collectives: vec![record], ..messages(0, &[], Phase::Forward) }
    };
    let mut late = messages(0, &[], Phase::Data);
    (late.place, late.entered) = (place4(3), BTreeMap::from([("tp".to_owned(), 182), ("pp".to_owned(), 7)]));
    let first = [waits_in(0, "pp", 7, 12 * SECOND), waits_in(1, "pp", 7, 11 * SECOND)];
    let report = analyse(&of(first.into_iter().chain([waits_in(2, "tp", 182, 10 * SECOND), late])));
    assert_eq!(
        report.findings[0].says,
        "rank 3 (pp 1, tp 1) has not entered all-reduce #182 on tp; it is in the data loader since 41 s, at step 3; \
         ranks 0 to 2 wait"
    );
    assert_eq!(report.findings.len(), 1, "{report}");
    assert!(report.to_string().contains("rank 0 waits for rank 2 in all-reduce #7 on pp since 38 s"), "{report}");
}

fn place4(rank: usize) -> Place {
    let along = |dimension: &str| Coordinate { dimension: dimension.to_owned(), index: 0, size: 2 };
    let origin = Place { world_size: 4, coordinates: vec![along("pp"), along("tp")], ..Place::default() };
    let mut place = origin.of(rank).unwrap();
    let (pp, tp) = (rank / 2, rank % 2);
    place.groups = BTreeMap::from([("pp".into(), vec![tp, tp + 2]), ("tp".into(), vec![2 * pp, 2 * pp + 1])]);
    place
}

#[test]
fn a_folder_is_read_and_what_is_wrong_with_it_is_said() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(read_folder(folder.path()), Err(Error::NoDumps { .. })));
    assert!(matches!(read_folder(&folder.path().join("none")), Err(Error::Read { .. })));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("rank_9.json", "{\"dump\":{\"place\"");
    write("rank_8.json", "[]");
    write("rank_3.txt", "not read");
    let error = read_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains("rank_8.json") && error.contains("rank_9.json"), "{error}");

    let (one, mut two) = (messages(1, &[("recv", 0, "Float", false)], Phase::Forward), messages(0, &[], Phase::Data));
    one.write(&folder.path().join("rank_1.json")).unwrap();
    one.write(&folder.path().join("rank_1_again.json")).unwrap();
    two.place.world_size = usize::MAX;
    two.write(&folder.path().join("rank_0.json")).unwrap();
    let end = End { how: "was killed by SIGKILL".into(), well: false, by_signal: true, told: true };
    Ends { world_size: 2, ranks: BTreeMap::from([(0, end)]) }.write(folder.path()).unwrap();
    let evidence = read_folder(folder.path()).unwrap();
    assert_eq!((evidence.dumps.len(), evidence.ends.ranks.len(), evidence.broken.len()), (1, 1, 4));
    let report = analyse(&evidence);
    report.write(folder.path()).unwrap();
    let text = std::fs::read_to_string(folder.path().join("report.txt")).unwrap();
    for part in [
        "rank 0 (pp 0) has not entered recv #0 on pp from rank 0; it left no record, and was killed by SIGKILL when told",
        "note: rank 0 left no record",
        "rank_1_again.json cannot be used: another file is of rank 1 too",
        "rank_8.json cannot be used",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    // The report is no record itself.
    assert_eq!(read_folder(folder.path()).unwrap(), evidence);

    // The next run begins without them, and without touching anything else.
    clear(folder.path(), "rank_").unwrap();
    let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["rank_1_again.json"]);
    clear(&folder.path().join("none"), "rank_").unwrap();
}
