#![doc = include_str!("../README.md")]

mod dim;
mod error;
mod layout;
mod mesh;
mod parts;
mod region;
pub mod reshard;
pub mod rng;

pub use dim::{Dim, View};
pub use error::{Error, Result};
pub use layout::{Layout, Split};
pub use mesh::{Coordinates, Degrees, Grid, Mesh};
pub use parts::Parts;
pub use region::{Region, Runs};
pub use reshard::{Plan, Run, Transfer};
pub use rng::{Distribution, Stream};
