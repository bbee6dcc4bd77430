//! The part of TensorFlow's `event.proto` and `summary.proto` that scalars need.

/// One event.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub(super) what: Option<What>,
}

/// What an event says.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum What {
    /// Always the first.
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// Values of one step.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<Value>,
}

/// A scalar. In the schema it is one of several kinds, so that 0 is written like any other number.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
}

/// A beginning or an end.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SessionLog {
    #[prost(enumeration = "Status", tag = "1")]
    pub(super) status: i32,
}

/// Of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum Status {
    Unspecified = 0,
    Start = 1,
}
