//! What the tests run, on threads and on processes.

pub(crate) mod llama;
pub(crate) mod sleepers;
