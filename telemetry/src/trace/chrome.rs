//! Traces as files that Chrome and Perfetto show, and back.
//!
//! Of the format: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>. A rank is a process,
//! a track a thread of it, or several where spans of one group overlap.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{RankTrace, Span, Trace, Track};
use crate::{Error, Place, Result};

/// No time in a trace is further from its beginning, in microseconds: thirty years.
const FAR: f64 = 1e15;

/// One entry of `traceEvents`.
#[derive(Debug, Serialize, Deserialize)]
struct Event<'a> {
    ph: Cow<'a, str>,
    name: Cow<'a, str>,
    pid: usize,
    #[serde(default)]
    tid: usize,
    #[serde(default)]
    cat: Cow<'a, str>,
    /// Microseconds.
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Map<String, Value>,
}

/// What our files say besides.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Other {
    ranks: Vec<Rank>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Rank {
    place: Place,
    dropped: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Contents {
    trace_events: Vec<Event<'static>>,
    other_data: Other,
}

impl Trace {
    /// Writes all ranks into one file.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn write(&self, path: &Path) -> Result<()> {
        let write = || {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            let mut out = BufWriter::new(File::create(path)?);
            let ranks = self.ranks.iter().map(|rank| Rank { place: rank.place.clone(), dropped: rank.dropped });
            write!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":")?;
            serde_json::to_writer(&mut out, &Other { ranks: ranks.collect() })?;
            write!(out, ",\"traceEvents\":[")?;
            let mut separator = "\n";
            for rank in &self.ranks {
                for event in events(rank) {
                    out.write_all(separator.as_bytes())?;
                    serde_json::to_writer(&mut out, &event)?;
                    separator = ",\n";
                }
            }
            writeln!(out, "\n]}}")?;
            out.flush()
        };
        write().map_err(|source: io::Error| Error::Write { path: path.to_owned(), source })
    }

    /// Reads a file that [`Trace::write`] wrote.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Trace`] for anything else.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Trace::parse(&bytes).map_err(|reason| Error::Trace { path: path.to_owned(), reason })
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let contents: Contents = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let mut ranks: BTreeMap<usize, RankTrace> = BTreeMap::new();
        for Rank { place, dropped } in contents.other_data.ranks {
            let rank = place.rank;
            if ranks.insert(rank, RankTrace { place, spans: Vec::new(), dropped }).is_some() {
                return Err(format!("it has rank {rank} twice"));
            }
        }
        for event in contents.trace_events.into_iter().filter(|event| event.ph == "X") {
            let rank = ranks.get_mut(&event.pid);
            let rank = rank.ok_or_else(|| format!("it has a span of rank {}, which it does not list", event.pid))?;
            rank.spans.push(span(event)?);
        }
        Ok(Trace { ranks: ranks.into_values().collect() })
    }
}

/// Puts the traces of several processes into one. Their clocks must be one.
///
/// # Errors
/// [`Error::Read`]; [`Error::Trace`] also for a rank that two files have.
pub fn merge(paths: &[PathBuf]) -> Result<Trace> {
    let mut ranks: BTreeMap<usize, RankTrace> = BTreeMap::new();
    for path in paths {
        for trace in Trace::read(path)?.ranks {
            let rank = trace.place.rank;
            if ranks.insert(rank, trace).is_some() {
                let reason = format!("it has rank {rank}, and so has another file");
                return Err(Error::Trace { path: path.clone(), reason });
            }
        }
    }
    Ok(Trace { ranks: ranks.into_values().collect() })
}

/// A rank's spans, and what its rows are called.
fn events(rank: &RankTrace) -> Vec<Event<'_>> {
    let pid = rank.place.rank;
    let mut threads: BTreeMap<(&Track, usize), usize> = BTreeMap::new();
    let mut ends: BTreeMap<&Track, Vec<i64>> = BTreeMap::new();
    let mut spans: Vec<&Span> = rank.spans.iter().collect();
    spans.sort_by_key(|span| (span.begin, std::cmp::Reverse(span.end)));
    let mut events = Vec::with_capacity(spans.len() + 8);
    for span in spans {
        let lane = match &span.track {
            Track::Communication(_) => lane(ends.entry(&span.track).or_default(), span),
            _ => 0,
        };
        let next = threads.len();
        let tid = *threads.entry((&span.track, lane)).or_insert(next);
        let mut args: Map<String, Value> =
            span.fields.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        let cat = match &span.track {
            Track::Compute => "compute",
            Track::Pipeline => "pipeline",
            Track::Communication(group) => {
                args.insert("group".to_owned(), group.clone().into());
                "communication"
            }
        };
        let (ts, dur) = (span.begin as f64 / 1e3, span.end.saturating_sub(span.begin) as f64 / 1e3);
        events.push(Event { ph: "X".into(), name: (&*span.name).into(), pid, tid, cat: cat.into(), ts, dur, args });
    }
    let mut name = |what: &'static str, tid: usize, key: &str, value: Value| {
        let args = Map::from_iter([(key.to_owned(), value)]);
        events.push(Event { ph: "M".into(), name: what.into(), pid, tid, cat: "".into(), ts: 0.0, dur: 0.0, args });
    };
    name("process_name", 0, "name", json!(rank.place.to_string()));
    name("process_sort_index", 0, "sort_index", json!(pid));
    for ((track, lane), &tid) in &threads {
        let label = match track {
            Track::Compute => "compute".to_owned(),
            Track::Pipeline => "pipeline".to_owned(),
            Track::Communication(group) if *lane == 0 => format!("communication: {group}"),
            Track::Communication(group) => format!("communication: {group} ({})", lane + 1),
        };
        name("thread_name", tid, "name", label.into());
    }
    // Compute, pipeline, communication: the order of tracks.
    for (place, &tid) in threads.values().enumerate() {
        name("thread_sort_index", tid, "sort_index", place.into());
    }
    events
}

/// The first lane that is free when the span begins.
fn lane(ends: &mut Vec<i64>, span: &Span) -> usize {
    match ends.iter().position(|&end| end <= span.begin) {
        Some(lane) => {
            ends[lane] = span.end;
            lane
        }
        None => {
            ends.push(span.end);
            ends.len() - 1
        }
    }
}

fn span(event: Event<'static>) -> Result<Span, String> {
    let Event { name, cat, ts, dur, args, .. } = event;
    if !(ts.abs() <= FAR && (0.0..=FAR).contains(&dur)) {
        return Err(format!("the span {name} begins at {ts} and takes {dur} microseconds"));
    }
    let track = match (&*cat, args.get("group").and_then(Value::as_str)) {
        ("compute", _) => Track::Compute,
        ("pipeline", _) => Track::Pipeline,
        ("communication", Some(group)) => Track::Communication(group.to_owned()),
        _ => return Err(format!("the span {name} is of the category {cat:?}")),
    };
    let begin = (ts * 1e3).round() as i64;
    let end = begin.saturating_add((dur * 1e3).round() as i64);
    let fields = args.into_iter().map(|(name, value)| (name.into(), value)).collect();
    Ok(Span { name, track, begin, end, fields })
}
