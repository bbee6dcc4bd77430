//! What a rank did when, as data.

use std::borrow::Cow;

use serde_json::Value;

use crate::{CollectiveRecord, Place};

/// On which of a rank's rows a span lies.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Track {
    /// What the rank's own thread does; spans lie inside each other or beside each other.
    Compute,
    /// Its thread too: computations of single stages on single microbatches.
    Pipeline,
    /// What is under way in a group of this name, while the thread does something else or waits.
    Communication(String),
}

/// Something that took time.
#[derive(Clone, PartialEq, Debug)]
pub struct Span {
    /// What it was.
    pub name: Cow<'static, str>,
    /// Where it lies.
    pub track: Track,
    /// When it began, in nanoseconds.
    pub begin: i64,
    /// When it ended.
    pub end: i64,
    /// What else is known of it.
    pub fields: Vec<(Cow<'static, str>, Value)>,
}

impl Span {
    /// The name of spans in which a rank stands still for others.
    pub const WAIT: &'static str = "wait";

    /// The name of spans that are one step each.
    pub const STEP: &'static str = "step";

    /// A field's text.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.field(name)?.as_str()
    }

    pub(super) fn field(&self, name: &str) -> Option<&Value> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }
}

/// The spans of one rank.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RankTrace {
    /// Which rank.
    pub place: Place,
    /// What it did, in any order.
    pub spans: Vec<Span>,
    /// How many spans there was no room for.
    pub dropped: u64,
}

impl RankTrace {
    /// Adds what the recorder knows of a collective that has ended: how long it was under way, and how long this rank
    /// stood still for it.
    pub fn add_collective(&mut self, record: &CollectiveRecord) {
        let Some(end) = record.finished else { return };
        let mut fields: Vec<(Cow<'static, str>, Value)> = vec![
            ("group".into(), record.group.clone().into()),
            ("op".into(), record.op.clone().into()),
            ("sequence".into(), record.sequence.into()),
        ];
        if let Some(begin) = record.waited {
            let (name, fields) = (Cow::Borrowed(Span::WAIT), fields.clone());
            self.spans.push(Span { name, track: Track::Compute, begin, end, fields });
        }
        fields.push(("bytes".into(), record.bytes.into()));
        fields.push(("shape".into(), record.shape.clone().into()));
        fields.push(("dtype".into(), record.dtype.clone().into()));
        fields.extend(record.peer.map(|peer| ("peer".into(), peer.into())));
        let (name, track) = (Cow::Owned(record.op.clone()), Track::Communication(record.group.clone()));
        self.spans.push(Span { name, track, begin: record.issued, end, fields });
    }
}

/// The spans of several ranks, on one clock.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Trace {
    /// One a rank, in the order of the ranks.
    pub ranks: Vec<RankTrace>,
}
