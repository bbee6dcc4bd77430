//! Traces: kept, written, read, added up.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use ferrotitan_telemetry::trace::{
    Clock, RankTrace, Row, Span, Spans, TARGET, Trace, Track, Waits, merge, pipeline_rows, slow_rank, summary,
};
use ferrotitan_telemetry::{CollectiveRecord, Coordinate, Error, Place};
use proptest::prelude::*;
use tracing_subscriber::layer::SubscriberExt as _;

/// The place of a rank in a mesh, with a group for each dimension and one of all ranks.
fn place(sizes: &[usize], rank: usize) -> Place {
    let world_size: usize = sizes.iter().product();
    let along =
        |(at, &size): (usize, &usize)| Coordinate { dimension: ["pp", "dp", "tp"][at].to_owned(), index: 0, size };
    let origin = Place { world_size, coordinates: sizes.iter().enumerate().map(along).collect(), ..Place::default() };
    let mut place = origin.of(rank).unwrap();
    for (at, name) in
        ["pp", "dp", "tp", "world"].into_iter().enumerate().filter(|(at, _)| *at < sizes.len() || *at == 3)
    {
        let same = |other: &usize| {
            let other = origin.of(*other).unwrap();
            (0..sizes.len()).all(|dim| at == 3 || dim == at || other.coordinates[dim] == place.coordinates[dim])
        };
        place.groups.insert(name.to_owned(), (0..world_size).filter(same).collect());
    }
    place
}

fn span(name: &'static str, track: Track, begin: i64, end: i64) -> Span {
    Span { name: name.into(), track, begin, end, fields: Vec::new() }
}

fn record(group: &str, op: &str, issued: i64, waited: i64, finished: i64) -> CollectiveRecord {
    CollectiveRecord {
        group: group.to_owned(),
        op: op.to_owned(),
        bytes: 48,
        shape: vec![6],
        dtype: "Double".to_owned(),
        issued,
        waited: Some(waited),
        finished: Some(finished),
        ..CollectiveRecord::default()
    }
}

#[test]
fn spans_are_kept_by_rank_while_they_are_wanted() {
    let spans = Spans::new(Clock::start());
    let subscriber = tracing_subscriber::registry().with(spans.layer());
    tracing::subscriber::with_default(subscriber, || {
        Spans::enter_rank(2);
        tracing::trace_span!(target: TARGET, "data").in_scope(|| ());
        spans.keep(true);
        let step = tracing::trace_span!(target: TARGET, "step", number = 7, loss = tracing::field::Empty);
        step.in_scope(|| {
            tracing::trace_span!("of somebody else").in_scope(|| ());
            let work = tracing::trace_span!(target: TARGET, "stage_forward", stage = 1, microbatch = 3);
            work.in_scope(|| thread::sleep(Duration::from_millis(2)));
        });
        step.record("loss", 0.5);
        drop(step);
        // A thread of no rank.
        let dispatch = tracing::dispatcher::get_default(Clone::clone);
        let other = || tracing::dispatcher::with_default(&dispatch, || drop(tracing::trace_span!(target: TARGET, "x")));
        thread::scope(|scope| scope.spawn(other).join().unwrap());
        spans.keep(false);
        tracing::trace_span!(target: TARGET, "data").in_scope(|| ());
    });
    let trace = spans.take(place(&[1, 1, 3], 2));
    let names: Vec<_> = trace.spans.iter().map(|span| (&*span.name, &span.track)).collect();
    assert_eq!(names, [("1F3", &Track::Pipeline), ("step", &Track::Compute)]);
    let (work, step) = (&trace.spans[0], &trace.spans[1]);
    assert!(step.begin <= work.begin && work.end <= step.end && work.end - work.begin >= 2_000_000);
    assert_eq!(step.fields, [("number".into(), 7.into()), ("loss".into(), 0.5.into())]);
    assert!(spans.take(place(&[1, 1, 3], 2)).spans.is_empty());
}

#[test]
fn the_parts_of_a_step_are_what_its_innermost_spans_say() {
    let mut rank = RankTrace { place: place(&[2, 1, 2], 1), ..RankTrace::default() };
    rank.spans = vec![
        span("step", Track::Compute, 100, 1100),
        span("data", Track::Compute, 100, 150),
        span("forward", Track::Compute, 150, 450),
        span("a detail", Track::Compute, 160, 400),
        span("backward", Track::Compute, 500, 900),
        span("optimizer", Track::Compute, 900, 1000),
        span("0F0", Track::Pipeline, 460, 480),
        span("checkpoint", Track::Compute, 1000, 1050),
        // Outside of any step.
        span("data", Track::Compute, 1200, 1300),
    ];
    // Under way for long, waited for briefly.
    rank.add_collective(&record("tp", "all-reduce", 160, 300, 330));
    rank.add_collective(&record("fsdp", "all-gather", 200, 410, 430));
    rank.add_collective(&record("pp", "recv", 480, 480, 500));
    rank.add_collective(&record("pp", "all-reduce", 1060, 1060, 1090));
    let unfinished = CollectiveRecord { finished: None, ..record("tp", "barrier", 0, 0, 0) };
    rank.add_collective(&unfinished);
    let summary = summary(&Trace { ranks: vec![rank] });
    let found = &summary.ranks[0];
    let ns = Duration::from_nanos;
    assert_eq!((found.steps, found.total, found.data), (1, ns(1000), ns(50)));
    let exposed = BTreeMap::from([("tp".into(), ns(30)), ("fsdp".into(), ns(20)), ("pp".into(), ns(30))]);
    assert_eq!((&found.exposed, found.bubble), (&exposed, ns(20)));
    assert_eq!(found.compute, ns(300 - 50 + 20 + 400 + 100));
    assert_eq!(found.other, ns(10 + 50 + 10 + 10));
    let table = summary.to_string();
    assert!(table.contains("rank 1 (pp 0, dp 0, tp 1)") && table.contains("wait fsdp"), "{table}");
}

fn any_spans() -> impl Strategy<Value = Vec<Span>> {
    let names = ["step", "forward", "data", "wait", "detail", "checkpoint"];
    let one = (0..names.len(), -50_i64..200, -10_i64..100, 0_usize..3).prop_map(move |(name, begin, length, track)| {
        let track = [Track::Compute, Track::Pipeline, Track::Communication("tp".to_owned())][track].clone();
        let mut span = span(names[name], track, begin, begin + length);
        span.fields = vec![("group".into(), "tp".into())];
        span
    });
    prop::collection::vec(one, 0..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_parts_add_up_whatever_the_spans_are(spans in any_spans()) {
        let trace = Trace { ranks: vec![RankTrace { place: place(&[1, 1, 2], 0), spans, dropped: 0 }] };
        let summary = summary(&trace);
        let rank = &summary.ranks[0];
        let exposed: Duration = rank.exposed.values().sum();
        prop_assert_eq!(rank.compute + exposed + rank.bubble + rank.data + rank.other, rank.total);
        let _ = summary.to_string();
    }

    #[test]
    fn a_trace_is_read_back(spans in any_spans(), more in any_spans()) {
        let folder = tempfile::tempdir().unwrap();
        let rank = |rank, mut spans: Vec<Span>| {
            spans.retain(|span| span.begin <= span.end);
            RankTrace { place: place(&[2, 1, 2], rank), spans, dropped: rank as u64 }
        };
        let traces = [rank(1, spans), rank(3, more)].map(|rank| Trace { ranks: vec![rank] });
        let files: Vec<PathBuf> = (0..2).map(|file| folder.path().join(format!("{file}.json"))).collect();
        traces.iter().zip(&files).for_each(|(trace, file)| trace.write(file).unwrap());
        let mut sorted = Trace { ranks: traces.iter().flat_map(|trace| trace.ranks.clone()).collect() };
        for rank in &mut sorted.ranks {
            rank.spans.sort_by_key(|span| (span.begin, std::cmp::Reverse(span.end)));
        }
        let merged = merge(&files).unwrap();
        prop_assert_eq!(&merged, &sorted);
        let twice = merge(&[files[0].clone(), files[0].clone()]);
        let refused = matches!(twice, Err(Error::Trace { .. }));
        prop_assert!(refused);
        // Spans on one row lie beside each other or inside each other.
        merged.write(&files[0]).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&std::fs::read(&files[0]).unwrap()).unwrap();
        let mut rows: BTreeMap<(u64, u64), f64> = BTreeMap::new();
        for event in value["traceEvents"].as_array().unwrap().iter().filter(|event| event["cat"] == "communication") {
            let row = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            let (begin, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            let free = rows.insert(row, begin + length).unwrap_or(f64::MIN);
            prop_assert!(free <= begin + 1e-9);
        }
    }

    #[test]
    fn a_broken_trace_is_an_error(cut in any::<prop::sample::Index>(), byte in any::<u8>(), at in any::<prop::sample::Index>()) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("trace.json");
        let mut rank = RankTrace { place: place(&[1, 1, 2], 1), ..RankTrace::default() };
        rank.add_collective(&record("tp", "all-reduce", 1, 2, 3));
        Trace { ranks: vec![rank] }.write(&file).unwrap();
        let whole = std::fs::read(&file).unwrap();
        let text = whole.trim_ascii_end();
        std::fs::write(&file, &text[..cut.index(text.len())]).unwrap();
        let refused = matches!(Trace::read(&file), Err(Error::Trace { .. }));
        prop_assert!(refused);
        let mut changed = whole.clone();
        changed[at.index(whole.len())] = byte;
        std::fs::write(&file, &changed).unwrap();
        // It may still be a trace, if another one.
        if let Ok(trace) = Trace::read(&file) {
            let _ = summary(&trace).to_string();
        }
    }

    #[test]
    fn the_slow_rank_is_found(
        sizes in prop::collection::vec(1_usize..4, 3).prop_filter("ranks", |sizes| sizes.iter().product::<usize>() > 1),
        program in prop::collection::vec((0_usize..4, 1_u64..20), 0..8),
        culprit in any::<prop::sample::Index>(),
        noise in prop::collection::vec(0_u64..50, 64),
    ) {
        let world: usize = sizes.iter().product();
        let (culprit, names) = (culprit.index(world), ["pp", "dp", "tp", "world"]);
        // Every dimension communicates at least once a step.
        let program: Vec<(usize, u64)> = program.into_iter().chain([(2, 3), (1, 5), (0, 2)]).collect();
        let mut ranks: Vec<Waits> =
            (0..world).map(|rank| Waits { place: place(&sizes, rank), ..Waits::default() }).collect();
        let mut clocks = vec![0_u64; world];
        for step in 0..4 {
            for (number, &(group, work)) in program.iter().enumerate() {
                for (rank, clock) in clocks.iter_mut().enumerate() {
                    let slower = if rank == culprit { 2000 } else { 0 };
                    *clock += 1000 * work + slower + noise[(7 * rank + 3 * number + step) % 64];
                }
                let arrived = clocks.clone();
                for rank in 0..world {
                    let Some(members) = ranks[rank].place.groups.get(names[group]) else { continue };
                    let ready = members.iter().map(|&member| arrived[member]).max().unwrap();
                    *ranks[rank].by_group.entry(names[group].to_owned()).or_default() +=
                        Duration::from_nanos(ready - arrived[rank]);
                    clocks[rank] = ready;
                }
            }
        }
        let found = slow_rank(&ranks).unwrap();
        prop_assert_eq!(found.place.rank, culprit, "{:?} {:?}: {:?}", sizes, program, found);
    }
}

#[test]
fn nobody_is_slow_where_nobody_waits() {
    let alone =
        Waits { place: place(&[1, 1, 1], 0), by_group: BTreeMap::from([("tp".into(), Duration::from_secs(1))]) };
    assert_eq!(slow_rank(&[alone]), None);
    let rank = |rank| Waits { place: place(&[1, 1, 2], rank), ..Waits::default() };
    assert_eq!(slow_rank(&[rank(0), rank(1)]), None);
}

#[test]
fn the_executed_schedule_is_that_of_the_first_ranks_along_pp() {
    let rank = |rank, shift: i64| RankTrace {
        place: place(&[2, 1, 2], rank),
        spans: vec![
            span("1B0", Track::Pipeline, shift + 700, shift + 900),
            span("step", Track::Compute, 0, 600),
            span("step", Track::Compute, 600, 2000),
            span("0F0", Track::Pipeline, 10, 20),
            span("0F1", Track::Pipeline, shift + 650, shift + 690),
        ],
        dropped: 0,
    };
    let rows = pipeline_rows(&Trace { ranks: vec![rank(0, 0), rank(1, 5), rank(2, 100)] }, 1);
    let row = |rank, action: &str, begin: i32, end: i32| Row {
        rank,
        action: action.to_owned(),
        begin: f64::from(begin) / 1e9,
        end: f64::from(end) / 1e9,
    };
    let expected = [row(0, "0F1", 0, 40), row(0, "1B0", 50, 250), row(1, "0F1", 100, 140), row(1, "1B0", 150, 350)];
    assert_eq!(rows, expected);
    assert_eq!(pipeline_rows(&Trace::default(), 0), []);
}
