//! Properties of meshes, layouts, resharding plans and random tensors, each against a plain enumeration.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod arbitrary;
mod layout;
mod mesh;
mod random;
mod region;
mod reshard;
